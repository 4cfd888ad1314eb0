"""Accounts for the blocks of the KV cache, in pure Python. It sees block numbers, never a block's content."""

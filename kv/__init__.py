"""Accounts for KV blocks, in pure Python; it knows block numbers, never what a block holds."""

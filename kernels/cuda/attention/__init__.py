"""Paged attention in Triton: prefill, decode, and the merge of split KV."""

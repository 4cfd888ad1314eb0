"""Tokenization, incremental detokenization, special tokens, stop strings."""

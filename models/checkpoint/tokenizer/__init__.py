"""Builds a tokenizer.json from what other files say about a tokenizer. Imports no tokenizer library."""

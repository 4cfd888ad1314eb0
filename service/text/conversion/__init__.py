"""Converts tokenizers in other formats, tekken.json, tokenizer.model and tiktoken.model, to a tokenizer.json."""

"""Converts tokenizers in other formats, tekken.json and tokenizer.model, to a tokenizer.json."""

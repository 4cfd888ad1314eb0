"""GGUF files: their header, and the config and the tokenizer that they describe."""

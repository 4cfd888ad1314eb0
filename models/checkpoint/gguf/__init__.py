"""GGUF files: their header, the config and the tokenizer that they describe, and the names of their tensors."""

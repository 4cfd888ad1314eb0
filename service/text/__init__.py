"""Text and tokens: tokenizing, detokenizing, special tokens, stop strings."""

"""Quantised checkpoints: what config.json says of them, which tensors make up a linear, and what these hold."""

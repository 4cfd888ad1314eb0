"""Quantised checkpoints: how config.json describes them, which tensors make up a linear, and what these hold."""

"""Sampling in Triton, from logits to tokens and log-probabilities."""

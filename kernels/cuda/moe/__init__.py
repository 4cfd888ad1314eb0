"""Mixture of experts in Triton: routing and grouped matrix products."""

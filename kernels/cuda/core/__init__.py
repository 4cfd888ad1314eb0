"""Compiles and launches Triton kernels; helpers that kernels share."""

"""Owns tensors: loads weights, runs steps and samples tokens. Knows no request, stream or client."""

"""Owns tensors: loads weights, runs a step and samples; it knows no request, stream or client."""

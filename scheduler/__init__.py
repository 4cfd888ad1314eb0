"""Decides what runs next, in pure Python; it knows neither gRPC nor tensors."""

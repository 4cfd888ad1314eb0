"""Shared by the backends on torch: weights, KV pages, sampling."""

"""Flags, addresses and the bounds of requests."""

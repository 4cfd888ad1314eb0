"""Speculative decoding against none, through the service."""

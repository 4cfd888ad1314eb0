"""Speculative decoding: drafters, and when drafting pays."""

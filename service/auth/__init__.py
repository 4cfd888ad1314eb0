"""Identifies callers and what they may do: keys, tokens, TLS, tenants' limits."""

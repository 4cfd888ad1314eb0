"""Who calls and what they may do: keys, tokens, TLS, tenants' limits."""

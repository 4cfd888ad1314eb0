"""Authentication and authorisation: API keys, tokens, TLS, and limits per tenant."""

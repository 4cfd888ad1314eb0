"""Draft heads, which continue from the model's own hidden states, on each backend."""

"""Output streams: messages, their pace, and readers that are slow."""

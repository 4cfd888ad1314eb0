"""Chat templates, rendered in separate processes."""

"""The rows of a batch and their state between steps. Uses no device."""

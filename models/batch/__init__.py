"""The rows of a batch and their state between steps. Knows no device."""

"""What the adapters of other engines' contracts share."""

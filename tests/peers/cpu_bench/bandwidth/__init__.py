"""How fast this machine reads memory, by several access patterns."""

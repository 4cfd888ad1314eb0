"""From messages to requests for the scheduler, and their lives until they end."""

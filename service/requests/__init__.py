"""Converts messages into requests for the scheduler, and manages each until it ends."""

"""Turns messages into requests for the scheduler, and follows each until it ends."""

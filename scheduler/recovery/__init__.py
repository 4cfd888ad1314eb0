"""Handles failed workers: restarts them, and finds the request that crashes them."""

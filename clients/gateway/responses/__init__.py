"""Turns the service's streams into OpenAI's answers and events."""

"""Turns OpenAI's requests into the service's: bodies, prompts, sampling, tools."""

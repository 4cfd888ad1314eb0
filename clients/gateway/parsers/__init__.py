"""Parsers of model output: tool calls and reasoning in each format. They know neither HTTP nor the service."""

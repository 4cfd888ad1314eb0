"""Parsers of model output: tool calls and reasoning in each format. Independent of HTTP and the service."""

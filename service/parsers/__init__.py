"""Parsers of model output: tool calls and reasoning in each format. Independent of requests and tokens."""

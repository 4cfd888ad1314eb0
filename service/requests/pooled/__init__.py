"""Requests for vectors, labels and scores: prompts without output."""

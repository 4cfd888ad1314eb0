"""Turns the Hugging Face config of each model family into a ``ModelSpec``; reads no weights."""

"""Reads what a model's files say: architecture, shapes, tensors. Imports no torch."""

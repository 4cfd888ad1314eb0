"""Reads a model's files: architecture, shapes, tensors. Does not import torch."""

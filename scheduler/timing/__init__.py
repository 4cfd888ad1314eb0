"""Predicts how long steps take and how long requests wait."""

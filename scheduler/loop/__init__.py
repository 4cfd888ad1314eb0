"""The engine's loop: plans steps, sends them to the worker, applies results."""

"""EAGLE-3 draft heads on each backend."""

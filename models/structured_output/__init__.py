"""Compiles grammars, caches them, and computes token masks from them during the forward pass."""

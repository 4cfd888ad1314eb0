"""Grammars: compiled, held, and turned into token masks beside the forward pass."""

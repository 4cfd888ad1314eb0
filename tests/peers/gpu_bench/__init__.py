"""Ours on one GPU: its kernels, its steps and its service beside their limits and beside transformers. See __main__."""

"""The CPU backend: the C++ kernels, their weights and memory."""

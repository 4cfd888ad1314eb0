"""Kernels: Triton for CUDA, C++ for CPUs, and a torch reference for both. Imports nothing else from penstock."""

"""Triton for CUDA, C++ for CPU and a torch reference for both; it imports nothing else of penstock."""

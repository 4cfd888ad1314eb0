"""The CUDA backend: Triton kernels and CUDA graphs."""

"""Triton kernels for CUDA. Each module has a kernel, the variants that are compiled of it, and a wrapper that asserts
shapes. The torch references in ``kernels/reference`` define the results. With TRITON_INTERPRET=1 everything runs
without a GPU."""

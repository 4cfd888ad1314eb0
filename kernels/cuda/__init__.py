"""Triton kernels for CUDA. Each module has a kernel, what it is compiled for, and a wrapper that asserts shapes; what
it computes is told by a torch reference in ``kernels.reference`` or ``kernels.reference_cuda``. With
TRITON_INTERPRET=1 all of it runs without a GPU."""

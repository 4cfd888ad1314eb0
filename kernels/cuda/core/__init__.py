"""How Triton kernels are compiled and launched, and what they share."""

"""The CPU's kernels: a library in C++, how it is built, and its bindings."""

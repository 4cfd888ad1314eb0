"""CPU kernels: a C++ library, its build and its bindings."""

"""The kernels: each on inputs of a model's shape."""

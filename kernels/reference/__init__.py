"""Every kernel in plain torch: the results that the fast kernels must reproduce."""

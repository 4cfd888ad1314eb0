"""Every kernel in plain torch: what the fast ones must compute."""

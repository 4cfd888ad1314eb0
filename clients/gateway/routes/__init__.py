"""One file for each HTTP route, and what all routes have in common."""

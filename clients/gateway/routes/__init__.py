"""One file for each HTTP route, and the base of all routes."""

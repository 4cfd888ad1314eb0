"""Models of how long steps take and requests wait."""

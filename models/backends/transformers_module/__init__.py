"""The backend for architectures without an implementation here: transformers' module with our paged attention."""

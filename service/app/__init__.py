"""Puts the server together, and starts it: by command, in process, with a gateway."""

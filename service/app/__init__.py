"""Composes the server and starts it: from the command line, as a child for library use, with an HTTP gateway."""

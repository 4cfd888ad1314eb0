"""Flags, listen addresses, and limits on the fields of requests."""

"""Starts and watches worker processes and exchanges frames with them, for the service. Imports no torch."""

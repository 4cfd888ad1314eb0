"""Starts, watches and talks to worker processes, for the service. Imports no torch."""

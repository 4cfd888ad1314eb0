"""Prints the table."""

from .table import table

print(table())

"""The type of JSON objects."""

from typing import Any

Json = dict[str, Any]
"""A JSON object of a response."""

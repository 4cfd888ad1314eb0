"""The type of the JSON objects of responses."""

from typing import Any

Json = dict[str, Any]

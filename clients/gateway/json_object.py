"""What answers are made of."""

from typing import Any

Json = dict[str, Any]
"""An object on its way to a caller."""

"""Reads fields of a Hugging Face config with limits, so that errors name the field. Independent of model families."""

import math
from collections.abc import Mapping
from typing import Any

from penstock.models.errors import ModelError

_INFINITY = {"__float__": "Infinity"}
"""How transformers writes an infinite number."""


class HfConfigReader:
    """A mapping in config.json; ``path`` is its place in the file. Every getter raises ModelError naming the field.

    ``aliases`` has the file's names of fields, by the names that callers use.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "", aliases: Mapping[str, str] | None = None) -> None:
        self._values = values
        self._path = path
        self._aliases = aliases or {}

    def with_aliases(self, **aliases: str) -> "HfConfigReader":
        """Returns a reader that finds the field ``name`` under ``aliases[name]``."""
        return HfConfigReader(self._values, self._path, aliases)

    def with_values(self, **values: Any) -> "HfConfigReader":
        """Returns a reader of a mapping in which these fields have these values."""
        return HfConfigReader({**self._values, **values}, self._path, self._aliases)

    def __contains__(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._values.get(self._in_file(name)) is not None

    def is_null(self, name: str) -> bool:
        """Whether the field is present and null."""
        return self._values.get(self._in_file(name), ...) is None

    def is_bool(self, name: str) -> bool:
        """Whether the field is true or false, for fields that may also have another type."""
        return isinstance(self._values.get(self._in_file(name)), bool)

    def is_text(self, name: str) -> bool:
        """Whether the field is a string, for fields that may also have another type."""
        return isinstance(self._values.get(self._in_file(name)), str)

    def is_list(self, name: str) -> bool:
        """Whether the field is a list, for fields that may also have another type."""
        return isinstance(self._values.get(self._in_file(name)), list)

    def names(self) -> list[str]:
        """Returns the names of all fields, in the order of the file."""
        return list(self._values)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]; ``default`` if the field is absent or null."""
        value: int = self._get(name, default)
        if not _is_integer(value, low, high):
            raise self.wrong(name, f"must be an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]; ``default`` if the field is absent or null."""
        value = self._get(name, default)
        if not _is_number(value, low, high):
            raise self.wrong(name, f"must be a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; ``default`` if the field is absent or null."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string; ``default`` if the field is absent or null."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "must be a string")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings."""
        value = self._get(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "must be a list of strings")
        return value

    def numbers(self, name: str, length: int, low: float, high: float) -> tuple[float, ...]:
        """A list of ``length`` numbers in [low, high], whose bounds may be infinite."""
        values = self._get(name, None)
        if isinstance(values, list):
            values = [math.inf if value == _INFINITY else value for value in values]
        if not isinstance(values, list) or len(values) != length or not all(_is_number(v, low, high) for v in values):
            raise self.wrong(name, f"must be a list of {length} numbers from {low:g} to {high:g}")
        return tuple(float(value) for value in values)

    def integers(self, name: str, low: int, high: int) -> list[int]:
        """A list of integers in [low, high]; empty if the field is absent or null."""
        values = self._get(name, [])
        if not isinstance(values, list) or not all(_is_integer(value, low, high) for value in values):
            raise self.wrong(name, f"must be a list of integers from {low} to {high}")
        return values

    def part(self, name: str) -> "HfConfigReader":
        """A mapping inside this one; empty if the field is absent or null."""
        value = self._values.get(self._in_file(name))
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.wrong(name, "must be an object")
        return HfConfigReader(value, f"{self._path}{name}.")

    def wrong(self, name: str, rule: str) -> ModelError:
        """The error for a field that breaks a rule."""
        name = self._in_file(name)
        value = repr(self._values.get(name))
        shown = value if len(value) <= 60 else value[:57] + "..."
        return ModelError(f"config.json: {self._path}{name} is {shown}: it {rule}")

    def _get(self, name: str, default: Any) -> Any:
        name = self._in_file(name)
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"config.json: {self._path}{name} is missing: download the model's config.json again")
        return default

    def _in_file(self, name: str) -> str:
        return self._aliases.get(name, name)


def _is_integer(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high

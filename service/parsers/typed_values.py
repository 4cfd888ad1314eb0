"""Arguments that a model writes as plain text, and whose JSON types the tool's schema determines."""

import json
import re
from collections.abc import Callable, Mapping

from penstock.service.parsers.base import Schema
from penstock.service.parsers.pythonic import value_as_json

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NULLS = ("null", "none")
"""What models write for null, in lower case."""
_MAX_DEPTH = 8
"""The limit on schemas inside schemas, such as ``anyOf`` and ``$ref``, that are searched for types."""
_TEXT = frozenset({"string"})
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_OF_VALUE = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def argument_types(parameters: Schema | None, name: str) -> frozenset[str]:
    """Returns the JSON types that a schema of arguments permits for one of them; ``string`` if it names none."""
    properties = (parameters or {}).get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return _types(schema, parameters or {}, set(), _MAX_DEPTH) or _TEXT


def _types(schema: object, root: Schema, seen: set[str], depth: int) -> frozenset[str]:
    """``seen``: the references that were followed already."""
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(each for each in named if isinstance(each, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_OF_VALUE.get(type(value), "object") for value in values)
    options = [option for key in _ALTERNATIVES if isinstance(schema.get(key), list) for option in schema[key]]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        options.append(_referenced(reference, root))
    return frozenset().union(*(_types(option, root, seen, depth - 1) for option in options))


def _referenced(reference: str, root: Schema) -> object:
    """Returns the part of the schema that a reference such as ``#/$defs/place`` names, if it is there."""
    if not reference.startswith("#/"):
        return None
    found: object = root
    for key in reference[2:].split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def typed_value(text: str, types: frozenset[str]) -> str:
    """Returns a value's JSON. It is the text itself as a string unless it is a value of one of the types: a string is
    preferred to any other type than null."""
    bare = text.strip()
    is_text = "string" in types
    if ("null" in types or not is_text) and bare.lower() in _NULLS:
        return "null"
    if not is_text:
        if "boolean" in types and bare.lower() in ("true", "false"):
            return bare.lower()
        if types & {"integer", "number"} and _NUMBER.fullmatch(bare):
            return bare
        if types & {"object", "array"} and (container := _container(bare)) is not None:
            return container
    return json.dumps(text, ensure_ascii=False)


def _container(text: str) -> str | None:
    """Returns the JSON of an object or array in the syntax of JSON or Python; None if it is neither."""
    if text[:1] not in ("{", "["):
        return None
    try:
        json.loads(text, parse_constant=_refuse_constant, parse_int=str)
    except (ValueError, RecursionError):
        return value_as_json(text)
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class ArgumentValue:
    """A value that arrives in parts. Passes on the JSON of a string as it arrives, and of another value at its end."""

    def __init__(self, types: frozenset[str], trims_line: bool, take: Callable[[str], None]) -> None:
        """``trims_line``: a line break at the beginning and one at the end are not part of the value."""
        self._types = types
        self._trims_line = trims_line
        self._take = take
        self._held: list[str] = []
        """What may still be another value than a string, or begin with a line break that is dropped."""
        self._num_held = 0
        self._streams = False
        self._last_break = ""
        """A line break that is dropped if the value ends after it."""

    def append_text(self, text: str) -> None:
        if self._streams:
            self._send(text)
            return
        self._held.append(text)
        self._num_held += len(text)
        if "string" in self._types and self._num_held > (_LONGEST_NULL if "null" in self._types else 1):
            self._streams = True
            text = self._text()
            self._held.clear()
            self._take('"')
            self._send(text)

    def end(self) -> None:
        """Passes on the rest of a complete value."""
        if self._streams:
            self._take('"')
            return
        text = self._text()
        if self._trims_line:
            text = text.removesuffix("\n")
        self._take(typed_value(text, self._types))

    def break_off(self) -> None:
        """Passes on the rest of an incomplete value as it is."""
        if self._streams or not self._held:
            return
        text = self._text()
        self._take(f'"{json_escaped(text)}' if "string" in self._types else text.rstrip())

    def _text(self) -> str:
        text = "".join(self._held)
        return text.removeprefix("\n") if self._trims_line else text

    def _send(self, text: str) -> None:
        text = self._last_break + text
        self._last_break = "\n" if self._trims_line and text.endswith("\n") else ""
        text = text.removesuffix(self._last_break)
        if text:
            self._take(json_escaped(text))


_LONGEST_NULL = 1 + max(map(len, _NULLS)) + 1
"""The characters of null with the line breaks around it."""


def json_escaped(text: str) -> str:
    """Returns a part of a string as it is in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]

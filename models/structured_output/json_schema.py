"""Rewrites JSON schemas before they are compiled, where the library would read them differently than clients mean them.

- If the service closes objects, an object that declares properties and does not mention others has no others.
- A pattern whose names are all properties is dropped: the library would allow a comma that no name can follow.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLTokenizer

Schema = dict[str, Any]

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTS = frozenset({"prefixItems", "items"})
_SINGLE = frozenset(
    {"items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains"}
    | {"propertyNames", "not", "if", "then", "else"}
)
BRANCHES = ("anyOf", "oneOf")
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "$schema", "$id", "$comment", "deprecated", "readOnly"}
    | {"writeOnly", "$defs", "definitions", "x-guidance"}
)
"""Keywords that do not restrict which values match."""


def resolved(root: object, reference: object) -> object | None:
    """Returns the target of a reference within a schema; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: object = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found if reference[1:2] in ("", "/") else None


def map_subschemas(
    schema: Schema, change: Callable[[Any], Any], change_own: Callable[[Any], Any] | None = None
) -> Schema:
    """Applies ``change`` to subschemas, and ``change_own`` to those for the same value as the schema itself."""
    changed = dict(schema)
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, Mapping):
            changed[key] = {name: change(each) for name, each in value.items()}
        elif key in _LISTS and isinstance(value, list):
            changed[key] = [change(each) for each in value]
        elif key in _SINGLE:
            changed[key] = change(value)
        elif key in ("allOf", *BRANCHES) and isinstance(value, list) and change_own is not None:
            changed[key] = [change_own(each) for each in value]
    return changed


class _Declared(NamedTuple):
    """The properties declared by the schemas that apply to one object."""

    names: dict[str, None]
    patterns: dict[str, None]
    is_explicit: bool
    """Whether one of the schemas covers properties that are not declared, or has alternatives of its own."""


class ObjectCloser:
    """Adds ``additionalProperties: false`` to the objects that have no other properties."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._open: dict[str, str] = {}
        """The names of open copies of the targets of references, by reference."""
        self._copies: Schema = {}

    def closed_root(self) -> Schema:
        """Returns the whole schema with its objects closed."""
        closed: Schema = self._closed(self._root)
        if self._copies:
            closed["$defs"] = {**(closed.get("$defs") or {}), **self._copies}
        return closed

    def _closed(self, schema: Any, others: Mapping[str, Mapping[str, None]] | None = None) -> Any:
        """``others``: names and patterns that a schema around this one declares for the same object."""
        if not isinstance(schema, dict):
            return schema
        keys = schema.keys() - ANNOTATIONS
        if keys == {"$ref"} and others is None:  # its target is closed where it is defined
            return map_subschemas(schema, self._closed)
        if keys == {"allOf"} and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1:
            return {**map_subschemas(schema, self._closed), "allOf": [self._closed(schema["allOf"][0], others)]}
        is_composed = "allOf" in keys or "$ref" in keys
        branches = [key for key in BRANCHES if isinstance(schema.get(key), list)]
        result = self._opened(schema) if is_composed else map_subschemas(schema, self._closed)
        declared = self._declared(schema, set())
        names = {**(others["names"] if others else {}), **declared.names}
        patterns = {**(others["patterns"] if others else {}), **declared.patterns}
        if declared.is_explicit or branches:
            shared = {"names": names, "patterns": patterns} if names or patterns else None
            change = self._opened if declared.is_explicit else partial(self._closed, others=shared)
            return {**result, **{key: [change(each) for each in schema[key]] for key in branches}}
        if names or patterns:
            own = result.get("properties")
            result["properties"] = {**dict.fromkeys(names, True), **(own if isinstance(own, dict) else {})}
            if isinstance(own, dict):  # the output has the properties in this order
                result["properties"] = {**own, **result["properties"]}
            if patterns:
                result["patternProperties"] = {
                    **dict.fromkeys(patterns, True),
                    **(result.get("patternProperties") or {}),
                }
            result["additionalProperties"] = False
        return result

    def _opened(self, schema: Any) -> Any:
        """Returns a schema that is not closed itself, since others apply to the same object. Its properties are."""
        if not isinstance(schema, dict):
            return schema
        result = map_subschemas(schema, self._closed, self._opened)
        target = resolved(self._root, schema.get("$ref"))
        if isinstance(target, dict):
            result["$ref"] = f"#/$defs/{self._copy_of(schema['$ref'], target)}"
        return result

    def _copy_of(self, reference: str, target: Schema) -> str:
        if reference not in self._open:
            name = f"open-{len(self._open)}"
            while name in (self._root.get("$defs") or {}):
                name += "-"
            self._open[reference] = name
            self._copies[name] = {key: value for key, value in self._opened(target).items() if key != "$defs"}
        return self._open[reference]

    def _declared(self, schema: Any, seen: set[str]) -> _Declared:
        if not isinstance(schema, dict):
            return _Declared({}, {}, False)
        properties, patterns = schema.get("properties"), schema.get("patternProperties")
        names = dict.fromkeys(properties if isinstance(properties, dict) else ())
        matched = dict.fromkeys(patterns if isinstance(patterns, dict) else ())
        is_explicit = "additionalProperties" in schema or "unevaluatedProperties" in schema
        parts = list(schema["allOf"]) if isinstance(schema.get("allOf"), list) else []
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            parts.append(resolved(self._root, reference))
        for part in parts:
            more = self._declared(part, seen)
            names |= more.names
            matched |= more.patterns
            is_explicit |= more.is_explicit or (isinstance(part, dict) and any(key in part for key in BRANCHES))
        return _Declared(names, matched, is_explicit)


def without_covered_patterns(schema: Any) -> Any:
    """Returns a schema without the patterns in ``patternProperties`` whose names are all properties, or required."""
    if not isinstance(schema, dict):
        return schema
    result = map_subschemas(schema, without_covered_patterns, without_covered_patterns)
    patterns, properties = result.get("patternProperties"), result.get("properties")
    if isinstance(patterns, dict) and isinstance(properties or {}, dict):
        _uncover(result, patterns, dict(properties or {}))
    return result


def _uncover(schema: Schema, patterns: Schema, properties: Schema) -> None:
    required = schema.get("required")
    wanted = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    names = dict.fromkeys([*properties, *wanted])
    left = dict(patterns)
    for pattern, held in patterns.items():
        covered = _covered(pattern, list(names))
        if covered is None:
            continue
        del left[pattern]
        for name in covered:
            properties[name] = {"allOf": [properties[name], held]} if name in properties else held
    if len(left) < len(patterns):
        schema["properties"], schema["patternProperties"] = properties, left
        if not left:
            del schema["patternProperties"]


def _covered(pattern: str, names: Sequence[str]) -> Sequence[str] | None:
    """Returns the elements of ``names`` that match a pattern; None if anything else matches it."""
    if not names:
        return None
    grammar = f"start: %json {json.dumps({'type': 'string', 'pattern': pattern})}"
    start = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    if start.is_error():
        return None
    found: list[str] = []
    ends = {json.dumps(name, ensure_ascii=False).encode(): name for name in names}
    todo = [(start, b"")]
    while todo:
        matcher, text = todo.pop()
        if text in ends:
            found.append(ends[text])
            continue
        nexts = {end[len(text)] for end in ends if end.startswith(text) and len(end) > len(text)}
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or allowed & ~sum(1 << byte for byte in nexts):
            return None
        for byte in nexts:
            if allowed >> byte & 1:
                after = matcher.deep_copy()
                after.consume_token(byte)
                todo.append((after, text + bytes([byte])))
    return sorted(found, key=list(names).index)

"""Rewrites schemas with numbers that the library would round, because it computes with doubles. The path from the root
to such a number is written in Lark; the parts beside it stay JSON schemas.

Integers are exact in ``const``, ``enum`` and the bounds of integers. Such numbers in other places are rejected.
"""

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from penstock.models.structured_output.json_schema import ANNOTATIONS, Schema, map_subschemas, resolved

MAX_EXACT = 1 << 53
"""Doubles represent all integers up to this one."""
MAX_DIGITS = 400
"""The maximum number of digits. A longer number is rejected at once, before it makes a grammar large."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NUMBERS = frozenset({*_BOUNDS, "multipleOf", "const", "enum"})


class NumberError(Exception):
    """A number that is not supported. The message contains its position."""


class Real(float):
    """A number with a fraction or an exponent, and its text."""

    text: str

    @classmethod
    def read(cls, text: str) -> "Real":
        real = cls(text)
        real.text = text
        return real

    @property
    def is_rounded(self) -> bool:
        """Whether the nearest double differs. Fractions below 2^53 do not count: they are always rounded."""
        return not abs(self) < MAX_EXACT and (abs(self) == float("inf") or Decimal(self.text) != Decimal(float(self)))


def read_integer(text: str) -> int:
    """Parses an integer. Raises ValueError if it has too many digits."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return int(text)


def is_inexact(value: object) -> bool:
    """Whether the library may round a number to another one."""
    if isinstance(value, Real):
        return value.is_rounded
    return isinstance(value, int) and abs(value) > MAX_EXACT


def has_inexact(value: object) -> bool:
    """Whether a JSON value has such a number anywhere."""
    if isinstance(value, Mapping):
        return any(map(has_inexact, value.values()))
    return any(map(has_inexact, value)) if isinstance(value, list) else is_inexact(value)


def without_annotations(schema: Any) -> Any:
    """Returns a schema without defaults and examples, because numbers in them do not matter."""
    if not isinstance(schema, dict):
        return schema
    result = map_subschemas(schema, without_annotations, without_annotations)
    return {key: value for key, value in result.items() if key not in ("default", "examples", "example")}


class ExactWriter:
    """Writes one schema as Lark rules. All of its references are within it."""

    def __init__(self, root: Schema, whitespace: str, number: int = 0) -> None:
        """``number`` distinguishes its rules from those of other schemas in the same grammar."""
        self._root = root
        self._options = root.get("x-guidance")
        self._prefix = f"exact_{number}"
        self._ws = f"{self._prefix}_ws"
        self._comma = f'{self._ws} "," {self._ws}'
        escaped = re.sub(r"(?<!\\)/", r"\\/", whitespace)
        self._rules = [f"{self._ws}: /(?:{escaped})?/"]
        self._known: dict[str, str] = {}
        """Rules by reference."""
        self._refs_inexact: dict[str, bool] = {}

    def rules(self) -> tuple[str, list[str]]:
        """Returns the name of the rule for the whole schema, and all rules. Raises NumberError."""
        return self._value(self._root, ""), self._rules

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _value(self, schema: Any, at: str) -> str:
        """Returns an expression for the values of a schema."""
        if not self._needs(schema, set()):
            return self._rule(f"%json {json.dumps(self._alone(schema), ensure_ascii=False)}")
        keys = schema.keys() - ANNOTATIONS
        if "$ref" in keys:
            self._only(keys, {"$ref"}, schema, at)
            return self._reference(schema["$ref"], at)
        if keys & {"const", "enum"}:
            self._only(keys, {"const", "enum", "type"}, schema, at)
            return self._one_of(schema, at)
        for key in ("anyOf", "allOf"):
            if isinstance(schema.get(key), list) and (key == "anyOf" or len(schema[key]) == 1):
                self._only(keys, {key}, schema, at)
                return self._any([self._value(each, f"{at}/{key}/{i}") for i, each in enumerate(schema[key])])
        kinds = schema.get("type")
        if kinds is None and "properties" in keys:
            kinds = "object"
        if isinstance(kinds, list):
            return self._any([self._typed(schema, kind, at) for kind in kinds])
        return self._typed(schema, kinds, at)

    def _typed(self, schema: Schema, kind: object, at: str) -> str:
        keys = schema.keys() - ANNOTATIONS - {"type"}
        alone = {key: value for key, value in schema.items() if key not in _NUMBERS} | {"type": kind}
        if kind == "integer":
            self._only(keys & _NUMBERS, set(_BOUNDS), schema, at)
            return self._rule(f"/{self._integers(schema, at)}/")
        if kind == "object" and self._needs(alone, set()):
            self._only(keys, {"properties", "required", "additionalProperties", *_NUMBERS}, schema, at)
            return self._object(schema, at)
        if kind == "array" and self._needs(alone, set()):
            self._only(keys, {"items", "minItems", "maxItems", *_NUMBERS}, schema, at)
            return self._array(schema, at)
        if kind in ("string", "boolean", "null", "object", "array"):
            return self._value(alone, at)
        raise self._refusal(schema, at)

    def _integers(self, schema: Schema, at: str) -> str:
        lows: list[int] = []
        highs: list[int] = []
        for key in _BOUNDS:
            value = schema.get(key)
            if value is None or isinstance(value, bool):
                continue
            if not isinstance(value, int):
                raise NumberError(f"{at}/{key}: with integers this large, a bound must be an integer without exponent")
            if key in ("minimum", "exclusiveMinimum"):
                lows.append(value + (key == "exclusiveMinimum" or schema.get("exclusiveMinimum") is True))
            else:
                highs.append(value - (key == "exclusiveMaximum" or schema.get("exclusiveMaximum") is True))
        low, high = max(lows, default=None), min(highs, default=None)
        if low is not None and high is not None and low > high:
            raise NumberError(f"{at}: no integer lies between its minimum and maximum")
        return integers_between(low, high)

    def _one_of(self, schema: Schema, at: str) -> str:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        if "const" in schema and "enum" in schema:
            values = [value for value in values if value == schema["const"]]
        kinds = schema.get("type")
        if kinds is not None:
            kinds = kinds if isinstance(kinds, list) else [kinds]
            values = [value for value in values if any(kind in _TYPES[type(value)] for kind in kinds)]
        if not values:
            raise NumberError(f"{at}: none of its values has its type")
        return self._any([self._literal(value) for value in values])

    def _literal(self, value: Any) -> str:
        if isinstance(value, dict):
            return self._listed("{", [self._member(name, self._literal(each)) for name, each in value.items()], "}")
        if isinstance(value, list):
            return self._listed("[", [self._literal(each) for each in value], "]")
        return quoted(value.text if isinstance(value, Real) else json.dumps(value, ensure_ascii=False))

    def _listed(self, opens: str, members: Sequence[str], closes: str) -> str:
        inside = f" {self._comma} ".join(members)
        return self._rule(f"{quoted(opens)} {self._ws} {inside} {self._ws if members else ''} {quoted(closes)}")

    def _member(self, name: str, value: str) -> str:
        return f'{quoted(json.dumps(name, ensure_ascii=False))} {self._ws} ":" {self._ws} {value}'

    def _object(self, schema: Schema, at: str) -> str:
        """Writes an object: its properties in their order, then others."""
        properties = dict(schema.get("properties") or {})
        required = set(schema.get("required") or ())
        for name in sorted(required - properties.keys()):
            properties[name] = schema.get("additionalProperties", True)
        others = schema.get("additionalProperties", True)
        after, first = '""', '""'
        if others is not False:
            names = "|".join(re.escape(json.dumps(name, ensure_ascii=False)).replace("/", r"\/") for name in properties)
            key = f"{self._prefix.upper()}_KEY_{len(self._rules)}"
            self._rules.append(f'{key}: /"[^"\\\\\\x00-\\x1f]*"/' + (f" & ~/{names}/" if names else ""))
            value = self._value(others, f"{at}/additionalProperties")
            other = self._rule(f'{key} {self._ws} ":" {self._ws} {value}')
            after = self._rule(f"({self._comma} {other})*")
            first = self._rule(f"({other} {after})?")
        for name, held in reversed(properties.items()):
            value = self._value(held, f"{at}/properties/{name}")
            member = self._rule(self._member(name, value))
            may_lack = name not in required
            first = self._rule(f"{member} {after}" + f" | {first}" * may_lack)
            after = self._rule(f"{self._comma} {member} {after}" + f" | {after}" * may_lack)
        return self._rule(f'"{{" {self._ws} {first} {self._ws} "}}"')

    def _array(self, schema: Schema, at: str) -> str:
        item = self._value(schema.get("items", True), f"{at}/items")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(least, int) or not isinstance(most, int | None) or (most is not None and most < least):
            raise NumberError(f"{at}: minItems and maxItems must be integers, and minItems at most maxItems")
        if most == 0:
            return self._rule(f'"[" {self._ws} "]"')
        upto = "" if most is None else str(most - 1)
        more = f"({self._comma} {item}){{{max(0, least - 1)},{upto}}}"
        items = f"{item} {more}" if least else f"({item} {more})?"
        return self._rule(f'"[" {self._ws} {items} {self._ws} "]"')

    def _reference(self, reference: object, at: str) -> str:
        target = resolved(self._root, reference)
        if not isinstance(reference, str) or not isinstance(target, dict):
            raise NumberError(f"{at}/$ref: points to nothing in this schema")
        if reference not in self._known:
            name = self._known[reference] = f"{self._prefix}_ref_{len(self._known)}"
            self._rules.append(f"{name}: {self._value(target, reference.removeprefix('#'))}")
        return self._known[reference]

    def _any(self, alternatives: Sequence[str]) -> str:
        return self._rule(" | ".join(alternatives) if alternatives else "/[^\\s\\S]/")

    def _needs(self, schema: Any, seen: set[str]) -> bool:
        """Whether a schema, or one that it references, has a number that would be rounded."""
        if isinstance(schema, list):
            return any(self._needs(each, seen) for each in schema)
        if not isinstance(schema, dict):
            return is_inexact(schema)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            if self._needs(resolved(self._root, reference), seen):
                return True
        return any(self._needs(value, seen) for key, value in schema.items() if key not in ANNOTATIONS)

    def _alone(self, schema: Any) -> Any:
        """Returns a part of the schema as a schema of its own."""
        if not isinstance(schema, dict):
            return {"allOf": [schema], "x-guidance": self._options}
        kept = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return {**_clamped(kept), **schema, "x-guidance": self._options}

    def _only(self, keys: set[str] | frozenset[str], known: set[str], schema: Schema, at: str) -> None:
        if keys - known:
            raise self._refusal(schema, at)

    def _refusal(self, schema: Schema, at: str) -> NumberError:
        where = _first_inexact(schema, at)
        return NumberError(
            f"{where}: a number beyond 2^53 is supported in const, enum and the bounds of an integer, but not "
            "below allOf, oneOf or patternProperties: leave it out, or make it smaller"
        )


def _clamped(value: Any) -> Any:
    """Replaces the numbers that would be rounded, in definitions that are copied but not referenced."""
    if isinstance(value, dict):
        return {key: _clamped(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_clamped(each) for each in value]
    return 0 if is_inexact(value) or value in (float("inf"), float("-inf")) else value


def _first_inexact(value: Any, at: str) -> str:
    """Returns the position of the first number of a schema that would be rounded."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return next((_first_inexact(each, f"{at}/{key}") for key, each in parts if has_inexact(each)), at)


_TYPES: Mapping[type, Sequence[str]] = {
    bool: ["boolean"], int: ["integer", "number"], Real: ["number"], str: ["string"], dict: ["object"],
    list: ["array"], type(None): ["null"],
}  # fmt: skip
"""The values of ``type`` that a value has, by its class in Python."""


def quoted(text: str) -> str:
    """Returns a text as a Lark string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\x7f")


def integers_between(low: int | None, high: int | None) -> str:
    """Returns a regular expression for the integers from ``low`` to ``high``, both included; None means no bound."""
    parts = []
    if low is None or low < 0:
        parts.append(f"-(?:{_naturals(max(1, -high if high is not None else 1), None if low is None else -low)})")
    if high is None or high >= 0:
        parts.append(_naturals(max(0, low or 0), high))
    return f"(?:{'|'.join(parts)})"


def _naturals(low: int, high: int | None) -> str:
    digits = str(low)
    if high is None:
        return f"{_same_length(digits, '9' * len(digits))}|[1-9][0-9]{{{len(digits)},}}"
    parts = []
    for length in range(len(digits), len(str(high)) + 1):
        least = max(low, 10 ** (length - 1) if length > 1 else 0)
        parts.append(_same_length(str(least), str(min(high, 10**length - 1))))
    return "|".join(parts)


def _same_length(low: str, high: str) -> str:
    """Returns a regular expression for the numbers between two that have the same number of digits."""
    if low == high:
        return low
    first, last, rest = low[0], high[0], len(low) - 1
    if first == last:
        return f"{first}(?:{_same_length(low[1:], high[1:])})"
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return f"[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else "")
    parts = [f"{first}(?:{_same_length(low[1:], '9' * rest)})"]
    if int(last) - int(first) > 1:
        parts.append(f"[{int(first) + 1}-{int(last) - 1}][0-9]{{{rest}}}")
    parts.append(f"{last}(?:{_same_length('0' * rest, high[1:])})")
    return "|".join(parts)

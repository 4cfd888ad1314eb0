"""Converts the arguments of a Python call to JSON."""

import ast
import json
import keyword
import re
import unicodedata
import warnings
from collections.abc import Callable

from penstock.service.parsers.incremental_text import IncrementalText, Reading

_FLAT = re.compile(r"""[^][(){}"']*""")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_JSON_NAMES = {"true": True, "false": False, "null": None}
"""JSON's names, which models sometimes write."""
_MAX_CODE_CHARS = 1 << 15
"""The limit on characters of a call's arguments outside strings: Python's parser takes some microseconds for each."""


def read_parentheses(source: IncrementalText) -> Reading[str | None]:
    """Reads from the next parenthesis to the one that closes it, or to the end of the text if none does. Returns None
    if the text is too large to be read as Python."""
    parts: list[str] = []
    closers: list[str] = []
    num_chars = 0
    while num_chars <= _MAX_CODE_CHARS:
        parts.append((yield from source.match(_FLAT)))
        char = yield from source.char()
        if not char:
            break
        parts.append(source.read_text(1))
        num_chars += len(parts[-2]) + 1
        if char in "'\"":
            if not (yield from source.to_quote(char, parts.append)):
                break
        elif char in _CLOSERS:
            closers.append(_CLOSERS[char])
        elif closers.pop() != char or not closers:
            break
    return "".join(parts) if num_chars <= _MAX_CODE_CHARS else None


def arguments_as_json(text: str) -> str | None:
    """Converts ``(a=1, b=[None])`` to ``{"a": 1, "b": [null]}``. Returns None unless all arguments are named and are
    JSON values."""
    return _as_json(f"f{text}", _arguments)


def value_as_json(text: str) -> str | None:
    """Converts ``{'a': None}`` to ``{"a": null}``. Returns None if it is not a JSON value in Python's syntax, or too
    large to be read as Python."""
    return _as_json(text, _json_value) if len(text) <= _MAX_CODE_CHARS else None


def _as_json(code: str, value_of: Callable[[ast.expr], object]) -> str | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings about invalid escapes would quote the text
            value = value_of(ast.parse(code, mode="eval").body)
        as_json = json.dumps(value, ensure_ascii=False, allow_nan=False)
        as_json.encode()
        return as_json
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _arguments(call: ast.expr) -> dict[str | None, object]:
    """Returns the arguments of a call. Raises ValueError unless all are named and are JSON values."""
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a call with named arguments")
    values = {keyword.arg: _json_value(keyword.value) for keyword in call.keywords}
    if None in values or len(values) < len(call.keywords):
        raise ValueError("not all arguments have a name of their own")
    return values


def _json_value(node: ast.expr) -> object:
    """Returns the JSON value of an expression. Numbers never become keys of a dictionary, since a model may write many
    with the same hash. Raises ValueError for an expression that is not a JSON value."""
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_json_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _json_value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
            if not isinstance(number, bool):
                return -number if isinstance(sign, ast.USub) else number
        case ast.Constant(value=value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
    raise ValueError("not a JSON value")


def _key(node: ast.expr | None) -> str:
    """Returns the key of an object as JSON's string."""
    value = None if node is None else _json_value(node)
    if node is None or isinstance(value, list | dict):
        raise ValueError("not a JSON key")
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)


def is_argument_name(name: str) -> bool:
    """Whether ``arguments_as_json`` would return an argument with the same name: Python normalises names."""
    return name.isidentifier() and not keyword.iskeyword(name) and unicodedata.is_normalized("NFKC", name)

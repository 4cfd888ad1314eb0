"""Converts the arguments of a Python call to JSON."""

import ast
import json
import keyword
import re
import unicodedata
import warnings

from penstock.clients.gateway.parsers.incremental_text import IncrementalText, Reading

_FLAT = re.compile(r"""[^][(){}"']*""")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_JSON_NAMES = {"true": True, "false": False, "null": None}
"""JSON's names, which models sometimes write."""
_MAX_CODE_CHARS = 1 << 15
"""Limit on the characters of a call's arguments outside strings: Python's parser takes some microseconds for each."""


def read_parentheses(source: IncrementalText) -> Reading[str | None]:
    """Reads from the parenthesis that comes next to the one that closes it, or to the end of the text if there is none.
    None if the text is too large to be read as Python."""
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
    """``(a=1, b=[None])`` as ``{"a": 1, "b": [null]}``; None unless all are named, and are values that JSON has."""
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings of invalid escapes would quote the text
            call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {keyword.arg: _json_value(keyword.value) for keyword in call.keywords}
        if None in values or len(values) < len(call.keywords):
            return None
        as_json = json.dumps(values, ensure_ascii=False, allow_nan=False)
        as_json.encode()
        return as_json
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _json_value(node: ast.expr) -> object:
    """Returns the JSON value of an expression. Numbers never become keys of a dictionary, since a model may write many
    with the same hash. Raises ValueError for an expression that JSON has no value for."""
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
    raise ValueError("no value that JSON has")


def _key(node: ast.expr | None) -> str:
    """The key of an object, which JSON writes as a string."""
    value = None if node is None else _json_value(node)
    if node is None or isinstance(value, list | dict):
        raise ValueError("no key that JSON has")
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)


def is_argument_name(name: str) -> bool:
    """Whether ``arguments_as_json`` would give an argument of that name back: Python normalises names."""
    return name.isidentifier() and not keyword.iskeyword(name) and unicodedata.is_normalized("NFKC", name)

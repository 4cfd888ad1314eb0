"""The arguments of a Python call, as text, and as JSON."""

import ast
import json
import keyword
import re
import unicodedata
import warnings

from penstock.clients.gateway.source import Reading, Source

_FLAT = re.compile(r"""[^][(){}"']*""")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_JSON_NAMES = {"true": True, "false": False, "null": None}


def read_parentheses(source: Source) -> Reading[str]:
    """Reads from a parenthesis, which is next, to the one that closes it; to wherever that cannot be found."""
    start = source.at
    closers: list[str] = []
    while True:
        yield from source.match(_FLAT)
        char = yield from source.char()
        if not char:
            break
        source.at += 1
        if char in "'\"":
            if not (yield from source.to_quote(char)):
                break
        elif char in _CLOSERS:
            closers.append(_CLOSERS[char])
        elif closers.pop() != char or not closers:
            break
    return source.between(start, source.at)


def arguments_as_json(text: str) -> str | None:
    """``(a=1, b=[None])`` as ``{"a": 1, "b": [null]}``; None unless all are named, and are values that JSON has."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of strange escapes: they would quote the text
            call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {keyword.arg: ast.literal_eval(_JsonNames().visit(keyword.value)) for keyword in call.keywords}
        if None in values or len(values) < len(call.keywords):
            return None
        as_json = json.dumps(values, ensure_ascii=False, allow_nan=False)
        as_json.encode()
        return as_json
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def is_argument_name(name: str) -> bool:
    """Whether ``arguments_as_json`` would give an argument of that name back: Python normalises names."""
    return name.isidentifier() and not keyword.iskeyword(name) and unicodedata.is_normalized("NFKC", name)


class _JsonNames(ast.NodeTransformer):
    """Models write JSON's names now and then."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node

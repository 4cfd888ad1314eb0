"""Converts custom tools, which take one text, to functions for the model: the text is the argument ``input``."""

import json
import re
from typing import Any

from penstock.clients.gateway.json_object import Json

_KEY = "input"
_OPENING = re.compile(rf'\s*\{{\s*"{_KEY}"\s*:\s*"')
_MAX_OPENING_CHARS = 256
"""If the text has not begun after this many characters, the arguments are read at the end of the call."""
_CHARACTERS = re.compile(r'(?:[^"\\]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_MAX_CHARACTER = len(r"\ud83d\ude00")
_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


def custom_function(name: str, description: str | None, syntax: str | None, definition: str | None) -> Json:
    """Returns a custom tool as a function. Its description contains the grammar of the input; ``syntax`` is lark or
    regex. A regular expression is part of the schema too."""
    text: dict[str, Any] = {"type": "string"}
    shown = [] if description is None else [description]
    if definition is not None:
        shown.append(
            f"The {_KEY} must match this {'regular expression' if syntax == 'regex' else 'Lark grammar'}:\n{definition}"
        )
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
    parameters = {"type": "object", "properties": {_KEY: text}, "required": [_KEY], "additionalProperties": False}
    function: Json = {"name": name, "parameters": parameters}
    return function | {"description": "\n\n".join(shown)} if shown else function


def custom_arguments(text: str) -> str:
    """Returns the arguments of a call with the input ``text``."""
    return json.dumps({_KEY: text}, ensure_ascii=False)


class CustomInput:
    """Extracts the input of a custom tool's call from the function's arguments as they arrive."""

    def __init__(self) -> None:
        self._unopened: list[str] = []
        """The arguments, until the text begins."""
        self._num_unopened = 0
        self._unread = ""
        self._is_open = False
        self._is_over = False

    def append_arguments(self, arguments: str) -> str:
        """Reads more arguments; returns the new part of the input."""
        if self._is_over:
            return ""
        self._unread += arguments
        if not self._is_open and not self._open():
            return ""
        return self._read()

    def end(self) -> str:
        """Ends the call; returns the rest of the input, or all of it if the arguments have another form."""
        if self._is_open:
            return ""
        whole = "".join(self._unopened)
        try:
            arguments = json.loads(whole or "{}")
        except (ValueError, RecursionError):
            return whole
        text = arguments.get(_KEY, "" if not arguments else None) if isinstance(arguments, dict) else None
        return _decoded(json.dumps(text)[1:-1]) if isinstance(text, str) else whole

    def _open(self) -> bool:
        """Whether the text has begun."""
        may_open = self._num_unopened <= _MAX_OPENING_CHARS
        self._unopened.append(self._unread)
        self._num_unopened += len(self._unread)
        self._unread = ""
        if not may_open:
            return False
        arguments = "".join(self._unopened)
        opening = _OPENING.match(arguments)
        if opening is not None:
            self._is_open = True
            self._unread = arguments[opening.end() :]
        return self._is_open

    def _read(self) -> str:
        found = _CHARACTERS.match(self._unread)
        assert found is not None, "the pattern also matches an empty text"
        text = found[0]
        self._is_over = self._unread[len(text) : len(text) + 1] == '"'
        if not self._is_over and (half := _HALF_OF_A_PAIR.search(text)) is not None:
            text = text[: half.start()]
        self._unread = self._unread[len(text) :]
        self._is_over = self._is_over or len(self._unread) >= _MAX_CHARACTER  # an escape that JSON does not have
        return _decoded(text)


def _decoded(text: str) -> str:
    """Decodes the characters of a JSON string. Half of a surrogate pair is not a character, and becomes U+FFFD."""
    value: str = json.loads(f'"{text}"', strict=False)
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

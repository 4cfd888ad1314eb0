"""Counts the values of a JSON text, and finds the path of a position, without creating objects.

Strings are skipped by the C code of ``bytes``. Each list and object costs a microsecond in Python, and their number
is limited. The text need not be valid: the parser checks that later.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

_BRACKETS = re.compile(rb"([\[\]{}])")
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_MAYBE_LARGE = re.compile(rb"[0-9]{300}|[eE]\+?[0-9]{3}")
_EXPONENT = re.compile(rb"[0-9][eE]")
_MAX_NAME_BYTES = 256
_MAX_INT_DIGITS = 4300
"""The parser's limit, the same as Python's."""

FREE_FORM = frozenset(
    {"arguments", "chat_template_kwargs", "documents", "guided_json", "json", "logit_bias", "metadata", "parameters",
     "schema", "template_variables"}
)  # fmt: skip
"""Fields whose members have arbitrary names: paths end there."""


@dataclass
class _Open:
    """A list or an object whose end has not been read."""

    is_list: bool
    index: int = 0
    name: bytes | None = None
    """The member of an object whose value is being read."""


class JsonScan:
    """Reads a text in parts."""

    def __init__(self, *, seeks_number: bool = False) -> None:
        """``seeks_number``: look for a number that is too large."""
        self.num_parts = 0
        """Lists, objects and strings so far, names included."""
        self.num_commas = 0
        self.max_depth = 0
        self.deepest_field = ""
        """The field of the outermost object with the deepest nesting."""
        self.parts_of: Counter[str] = Counter()
        """``num_parts`` by the field of the outermost object."""
        self.commas_of: Counter[str] = Counter()
        self.reals_of: Counter[str] = Counter()
        self.large_number: str | None = None
        """The path of the first number with too many digits, or beyond a double's range, if it is looked for."""
        self.num_reals = 0
        """Numbers with a fraction or an exponent. One with both counts twice."""
        self._seeks_number = seeks_number
        self._accounted = (0, 0, 0)
        self._open: list[_Open] = []
        self._in_string = False
        self._is_escaped = False
        """Whether the next byte is the second one of an escape sequence."""
        self._string = b""
        """The beginning of the latest string, which may be a name."""

    def feed(self, text: bytes) -> None:
        """Reads more text, which must not end within a number if ``seeks_number``."""
        if self._is_escaped and text:
            text, self._is_escaped = text[1:], False
        if b"\\" in text:
            if (len(text) - len(text.rstrip(b"\\"))) % 2:
                text, self._is_escaped = text[:-1], True
            text = text.replace(rb"\\", b"").replace(rb"\"", b"")  # the remaining quotes end strings
        for number, part in enumerate(text.split(b'"')):
            if number:
                self._in_string = not self._in_string
                if self._in_string:
                    self.num_parts += 1
                    self._string = b""
            if self._in_string:
                self._string += part[: _MAX_NAME_BYTES - len(self._string)]
            elif part:
                field = self.field
                self._read_structure(part)
                self._account(self.field or field)

    @property
    def field(self) -> str:
        """The field of the outermost object that is being read; empty where there is none."""
        name = self._open[0].name if self._open else None
        return _shown(name) if name is not None else ""

    def path(self) -> str:
        """Returns where the text that was read ends, as a caller would write it: messages[0].content."""
        path = ""
        for each in self._open:
            if each.is_list:
                path += f"[{each.index}]"
            elif each.name is not None:
                name = _shown(each.name)
                path += f".{name}" if path else name
                if name in FREE_FORM:
                    break
        return path

    def _account(self, field: str) -> None:
        self.parts_of[field] += self.num_parts - self._accounted[0]
        self.commas_of[field] += self.num_commas - self._accounted[1]
        self.reals_of[field] += self.num_reals - self._accounted[2]
        self._accounted = self.num_parts, self.num_commas, self.num_reals

    def _read_structure(self, text: bytes) -> None:
        for piece in _BRACKETS.split(text):
            if piece in (b"[", b"{"):
                self.num_parts += 1
                self._open.append(_Open(piece == b"["))
                if len(self._open) > self.max_depth:
                    self.max_depth, self.deepest_field = len(self._open), self.field
            elif piece in (b"]", b"}"):
                if self._open:
                    self._open.pop()
            elif piece:
                self._read_between(piece)

    def _read_between(self, text: bytes) -> None:
        """Reads the text between strings and brackets: colons, commas and numbers."""
        if self._seeks_number and self.large_number is None and _MAYBE_LARGE.search(text):
            start = next((match.start() for match in _NUMBER.finditer(text) if _is_too_large(match[0])), None)
            if start is not None:
                self._advance(text[:start])
                self.large_number = self.path()
                text = text[start:]
        self._advance(text)

    def _advance(self, text: bytes) -> None:
        num_commas = text.count(b",")
        self.num_commas += num_commas
        self.num_reals += text.count(b".")
        if b"e" in text or b"E" in text:
            self.num_reals += len(_EXPONENT.findall(text))
        if not self._open:
            return
        last = self._open[-1]
        if last.is_list:
            last.index += num_commas
            return
        if b":" in text:
            last.name = self._string
        if num_commas:
            last.name = None


def _is_too_large(number: bytes) -> bool:
    digits = number.lstrip(b"-")
    if digits.isdigit():
        return len(digits) > _MAX_INT_DIGITS
    return math.isinf(float(number))


def _shown(name: bytes) -> str:
    return name.decode(errors="replace")

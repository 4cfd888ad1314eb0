"""Text that comes in parts, for parsers that are written as if it were whole.

What reads it is a generator that yields where it needs more, so that how the text was cut cannot change what it reads.
"""

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Yields where it needs more text; returns what it read."""

_SPACE = re.compile(r"\s*")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_FLAT = re.compile(r'[^][{}"]*')
_SCALAR = re.compile(r"[^\s,}\]]*")
_CLOSERS = {"{": "}", "[": "]"}


class Source:
    """The text that has come, and how far it is read."""

    def __init__(self) -> None:
        self.at = 0
        """Where reading goes on, from the text's beginning."""
        self.ended = False
        """Whether no more will come."""
        self._text = ""
        self._base = 0
        self._kept_from: int | None = None

    def add(self, text: str) -> None:
        """More text. What was read is forgotten, unless ``keep`` said otherwise."""
        start = self.at if self._kept_from is None else self._kept_from
        self._text = self._text[start - self._base :] + text
        self._base = start

    def keep(self) -> None:
        """Remembers all from here on, so that reading may go back here."""
        self._kept_from = self.at

    def go_back(self) -> None:
        """Unreads all since the last ``keep``, and ends it."""
        assert self._kept_from is not None
        self.at = self._kept_from
        self._kept_from = None

    def forget(self) -> None:
        """Ends ``keep``."""
        self._kept_from = None

    @property
    def rest(self) -> str:
        """What has come and is not read."""
        return self._text[self.at - self._base :]

    def between(self, start: int, end: int) -> str:
        """A part of what has come since ``keep``, or since the last text was added."""
        assert start >= self._base
        return self._text[start - self._base : end - self._base]

    def char(self) -> Reading[str]:
        """The next character, which stays unread; empty at the end."""
        while True:
            index = self.at - self._base
            if index < len(self._text):
                return self._text[index]
            if self.ended:
                return ""
            yield

    def after_space(self) -> Reading[str]:
        """Reads white space; the next character as ``char`` has it."""
        while True:
            self._pass(_SPACE)
            if self._has_more or self.ended:
                return (yield from self.char())
            yield

    def starts_with(self, marker: str) -> Reading[bool]:
        """Whether the text goes on with ``marker``, which is then read."""
        while True:
            rest = self.rest
            if rest.startswith(marker):
                self.at += len(marker)
                return True
            if self.ended or not marker.startswith(rest):
                return False
            yield

    def match(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads what matches, as far as it goes; after ``keep``."""
        start = self.at
        while True:
            self._pass(pattern)
            if self._has_more or self.ended:
                return self.between(start, self.at)
            yield

    def string(self) -> Reading[str | None]:
        """Reads a JSON string, whose quote is next; None if it is none. After ``keep``."""
        start = self.at
        self.at += 1
        if not (yield from self.to_quote('"')):
            return None
        try:
            value = json.loads(self.between(start, self.at), strict=False)
            value.encode()
        except ValueError:  # a bad escape, or half of a surrogate pair
            return None
        assert isinstance(value, str)
        return value

    def scalar(self) -> Reading[str]:
        """Reads a number or a name such as null."""
        return (yield from self.match(_SCALAR))

    def nested(self, take: Callable[[str], None]) -> Reading[bool]:
        """Reads a JSON object or array, whose bracket is next, and gives it to ``take`` as it comes. False if it ends
        before its last bracket, or its brackets don't match: what was read has been taken."""
        closers: list[str] = []
        in_string = False
        while True:
            start = self.at
            in_string, whole = self._pass_nested(closers, in_string)
            if self.at > start:
                take(self.between(start, self.at))
            if whole is not None:
                return whole
            if self.ended:
                return False
            yield

    def _pass_nested(self, closers: list[str], in_string: bool) -> tuple[bool, bool | None]:
        """As far as the text goes: whether that is inside a string, and whether the value is whole or broken, if it is
        either."""
        while self._has_more:
            if in_string:
                if not self._pass_string('"'):
                    break
                in_string = False
            self._pass(_FLAT)
            if not self._has_more:
                break
            char = self._text[self.at - self._base]
            if char in _CLOSERS:
                closers.append(_CLOSERS[char])
            elif char == '"':
                in_string = True
            elif not closers or closers.pop() != char:
                return False, False
            self.at += 1
            if not closers:
                return False, True
        return in_string, None

    def to_quote(self, quote: str) -> Reading[bool]:
        """Reads the rest of a string, and the quote that ends it; False if there is none."""
        while True:
            if self._pass_string(quote):
                return True
            if self.ended:
                return False
            yield

    def _pass_string(self, quote: str) -> bool:
        """Up to the end of a string that was entered, if that has come. A backslash stays unread until what it escapes
        is there."""
        while True:
            self._pass(_PLAIN[quote])
            index = self.at - self._base
            if index >= len(self._text):
                return False
            if self._text[index] == quote:
                self.at += 1
                return True
            if index + 1 >= len(self._text):
                return False
            self.at += 2

    def _pass(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self.at - self._base)
        assert found is not None, "the patterns match nothing, too"
        self.at = self._base + found.end()

    @property
    def _has_more(self) -> bool:
        return self.at - self._base < len(self._text)

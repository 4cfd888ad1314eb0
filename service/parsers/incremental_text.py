"""Text that arrives in parts, for parsers that are written as if it were whole.

A parser is a generator that yields where it needs more text, so that the division into parts cannot change its result.
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
_FLAT = re.compile(r"[-+.,:\s0-9Eaeflnrstu]*")
"""JSON outside strings and brackets. No marker of a call begins with it: an attempt at a call ends at the next marker,
unless that is in a string. So at most two attempts read the same text, and the time is linear in its length."""
_SCALAR = re.compile(r"[-+.\w]*")
_CLOSERS = {"{": "}", "[": "]", '"': '"'}


class IncrementalText:
    """The text so far, and the position of the reader."""

    def __init__(self) -> None:
        self.at = 0
        self.ended = False
        self._text = ""
        self._base = 0
        """The position of ``_text`` in the whole text."""
        self.kept_from: int | None = None
        """The position of the last ``keep``, until it ends."""
        self._kept: list[str] = []
        """The text from ``kept_from`` up to ``_text``."""

    def append_text(self, text: str) -> None:
        """Adds more text. Drops the text that was read, unless ``keep`` was called."""
        index = self._index
        if self.kept_from is not None:
            self._kept.append(self._text[max(self.kept_from - self._base, 0) : index])
        self._text = self._text[index:] + text
        self._base = self.at

    def keep(self) -> None:
        """Keeps all text from here on, so that ``go_back`` can return here."""
        self.kept_from = self.at
        self._kept.clear()

    def go_back(self) -> None:
        """Returns to the position of the last ``keep``, and ends it."""
        assert self.kept_from is not None
        self.at = self.kept_from
        if self.at < self._base:
            self._text = "".join([*self._kept, self._text])
            self._base = self.at
        self.end_keep()

    def end_keep(self) -> None:
        self.kept_from = None
        self._kept.clear()

    @property
    def num_unread(self) -> int:
        return len(self._text) - self._index

    def find(self, marker: str) -> int:
        """Returns how many characters come before ``marker``; -1 if it has not arrived."""
        found = self._text.find(marker, self._index)
        return found if found < 0 else found - self._index

    def num_held(self, marker: str) -> int:
        """Returns how many characters at the end may be the beginning of ``marker``."""
        return num_held(self._text[max(self._index, len(self._text) - len(marker)) :], marker)

    def read_text(self, length: int) -> str:
        """Reads ``length`` characters that have arrived."""
        start, self.at = self.at, self.at + length
        return self._since(start)

    def char(self) -> Reading[str]:
        """Returns the next character without reading it; empty at the end."""
        while True:
            index = self._index
            if index < len(self._text):
                return self._text[index]
            if self.ended:
                return ""
            yield

    def after_space(self) -> Reading[str]:
        """Reads white space; returns the next character like ``char``."""
        yield from self.match(_SPACE)
        return (yield from self.char())

    def starts_with(self, marker: str) -> Reading[bool]:
        """Returns whether ``marker`` is next, and reads it if so."""
        while True:
            if self._text.startswith(marker, self._index):
                self.at += len(marker)
                return True
            if self.ended or self.num_unread >= len(marker) or not marker.startswith(self._text[self._index :]):
                return False
            yield

    def match(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads the longest match at this position."""
        parts: list[str] = []
        while True:
            start = self.at
            self._pass(pattern)
            parts.append(self._since(start))
            if self._has_more or self.ended:
                return "".join(parts)
            yield

    def string(self) -> Reading[str | None]:
        """Reads a JSON string, whose quote is next; None if it is invalid."""
        parts = [self.read_text(1)]
        if not (yield from self.to_quote('"', parts.append)):
            return None
        try:
            value = json.loads("".join(parts), strict=False)
            value.encode()
        except ValueError:  # a bad escape, or half of a surrogate pair
            return None
        assert isinstance(value, str)
        return value

    def scalar(self) -> Reading[str]:
        """Reads a number or a name such as null."""
        return (yield from self.match(_SCALAR))

    def nested(self, take: Callable[[str], None]) -> Reading[bool]:
        """Reads a JSON object or array, whose bracket is next, and passes it to ``take`` as it arrives. False if it
        ends before its last bracket, its brackets do not match, or it is not JSON; ``take`` has then received the part
        so far."""
        closers: list[str] = []
        return (yield from self._pass_on(lambda: self._pass_nested(closers), take))

    def to_quote(self, quote: str, take: Callable[[str], None]) -> Reading[bool]:
        """Reads the rest of a string, and the quote that ends it, and passes it to ``take`` as it arrives; False if
        there is no such quote."""
        return (yield from self._pass_on(lambda: self._pass_string(quote) or None, take))

    def _pass_on(self, read: Callable[[], bool | None], take: Callable[[str], None]) -> Reading[bool]:
        """Passes what ``read`` reads of the available text to ``take``, until it returns whether that is valid; False
        at the end of the text."""
        while True:
            start = self.at
            is_valid = read()
            if self.at > start:
                take(self._since(start))
            if is_valid is not None or self.ended:
                return bool(is_valid)
            yield

    def _pass_nested(self, closers: list[str]) -> bool | None:
        """Reads to the end of the available text: returns whether the value is valid, None if it is incomplete.
        ``closers`` end the open brackets and the current string."""
        while self._has_more:
            if closers and closers[-1] == '"':
                if not self._pass_string('"'):
                    break
                closers.pop()
            self._pass(_FLAT)
            if not self._has_more:
                break
            char = self._text[self._index]
            if char in _CLOSERS:
                closers.append(_CLOSERS[char])
            elif not closers or closers.pop() != char:
                return False
            self.at += 1
            if not closers:
                return True
        return None

    def _pass_string(self, quote: str) -> bool:
        """Reads to the end of the current string, if available. A backslash stays unread until the character after it
        arrives."""
        while True:
            self._pass(_PLAIN[quote])
            index = self._index
            if index >= len(self._text):
                return False
            if self._text[index] == quote:
                self.at += 1
                return True
            if index + 1 >= len(self._text):
                return False
            self.at += 2

    def _pass(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._index)
        assert found is not None, "the patterns also match an empty text"
        self.at = self._base + found.end()

    def _since(self, start: int) -> str:
        """Returns the part of the latest text that was read."""
        return self._text[start - self._base : self._index]

    @property
    def _index(self) -> int:
        return self.at - self._base

    @property
    def _has_more(self) -> bool:
        return self._index < len(self._text)


def num_held(text: str, marker: str) -> int:
    """Returns how many characters at the end of ``text`` may be the beginning of ``marker``."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class HeldSpace:
    """White space at the end of a text that arrives in parts, held back until other text follows."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.length = 0
        """The number of characters held back."""

    def append_text(self, text: str) -> tuple[str, int]:
        """Adds text. Returns the text that is no longer held back, and the number of characters that are."""
        visible = text.rstrip()
        space = text[len(visible) :]
        if visible:
            visible = self.take_text() + visible
        if space:
            self._parts.append(space)
            self.length += len(space)
        return visible, self.length

    def take_text(self) -> str:
        """Releases and returns the text that was held back."""
        held = "".join(self._parts)
        self._parts.clear()
        self.length = 0
        return held

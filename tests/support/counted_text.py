"""Counts what parsers do to a text, in operations rather than seconds: characters read or copied, and calls made."""

import re
import sys
from contextlib import contextmanager
from types import ModuleType

from penstock.clients.gateway.requests import custom_tools
from penstock.service.parsers import (
    gemma_calls,
    harmony,
    incremental_text as source,
    marked_calls,
    pythonic,
    tagged_calls,
    tool_formats as tool_calls,
    typed_values,
)

_READERS: tuple[ModuleType, ...] = (
    custom_tools, gemma_calls, harmony, marked_calls, pythonic, source, tagged_calls, tool_calls, typed_values
)  # fmt: skip
"""The modules whose patterns read a model's text."""


class TooManyOperations(AssertionError):
    """Ends a test at once: what is not linear might take hours."""


class Count:
    """The operations so far, and how many there may be."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.num_operations = 0

    def add(self, operations: int) -> None:
        """Raises TooManyOperations."""
        self.num_operations += operations
        if self.num_operations > self.allowed:
            raise TooManyOperations(f"more than {self.allowed} operations")


class CountedText(str):
    """A text whose characters count whenever they are read or copied, as those of its parts do."""

    __slots__ = ("counter",)
    counter: Count

    @classmethod
    def of(cls, text: str, count: Count) -> "CountedText":
        """``text``, counted as copied."""
        new = cls(text)
        new.counter = count
        count.add(len(text) + 1)
        return new

    def __add__(self, other):
        return self.of(str.__add__(self, other), self.counter)

    def __radd__(self, other):
        return self.of(str.__add__(other, self), self.counter)

    def __getitem__(self, key):
        return self.of(str.__getitem__(self, key), self.counter)

    def find(self, wanted, start=0, end=None):
        """Reads up to what is found."""
        found = str.find(self, wanted, start, end)
        self.counter.add((len(self) if found < 0 else found) - start + 1)
        return found

    def partition(self, wanted):
        """Copies all parts."""
        return tuple(self.of(part, self.counter) for part in str.partition(self, wanted))

    def strip(self, *chars):
        """Copies what is left."""
        self.counter.add(len(self))
        return self.of(str.strip(self, *chars), self.counter)

    def lstrip(self, *chars):
        """Copies what is left."""
        self.counter.add(len(self))
        return self.of(str.lstrip(self, *chars), self.counter)

    def rstrip(self, *chars):
        """Copies what is left."""
        self.counter.add(len(self))
        return self.of(str.rstrip(self, *chars), self.counter)

    def removeprefix(self, prefix):
        """Copies what is left."""
        return self.of(str.removeprefix(self, prefix), self.counter)


class _CountedPattern:
    def __init__(self, pattern: re.Pattern[str], count: Count) -> None:
        self._pattern = pattern
        self._count = count

    def match(self, text, start=0):
        found = self._pattern.match(text, start)
        self._count.add((len(text) if found is None else found.end()) - start + 1)
        return found

    def fullmatch(self, text):
        self._count.add(len(text) + 1)
        return self._pattern.fullmatch(text)

    def sub(self, replacement, text):
        self._count.add(len(text) + 1)
        return self._pattern.sub(replacement, text)

    def search(self, text):
        self._count.add(len(text))
        return self._pattern.search(text)


def _counted(value, count):
    if isinstance(value, re.Pattern):
        return _CountedPattern(value, count)
    if isinstance(value, dict):
        return {key: _counted(each, count) for key, each in value.items()}
    return value


@contextmanager
def counting(monkeypatch, allowed):
    """Counts in the block; raises TooManyOperations beyond ``allowed``."""
    count = Count(allowed)
    go_back = source.IncrementalText.go_back

    def counted_go_back(self):
        go_back(self)
        if not isinstance(self._text, CountedText):
            self._text = CountedText.of(self._text, count)

    def profile(frame, event, arg):
        if event in ("call", "c_call") and "penstock" in frame.f_globals.get("__name__", ""):
            count.add(1)

    with monkeypatch.context() as patch:
        patch.setattr(source.IncrementalText, "go_back", counted_go_back)
        for module in _READERS:
            for name, value in vars(module).items():
                if name.startswith("_") and not name.startswith("__"):
                    patch.setattr(module, name, _counted(value, count))
        sys.setprofile(profile)
        try:
            yield count
        finally:
            sys.setprofile(None)

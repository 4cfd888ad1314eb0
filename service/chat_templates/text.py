"""Text that remembers which of its characters a chat template wrote, through the operations of the template.

A template's own constants are ``TemplateText``; a caller's text is an ordinary ``str``. Operations that combine the two
keep the origin of each character. An operation that this module does not support returns an ordinary ``str``, so that a
caller's text never passes for the template's.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Self, SupportsIndex, TypeVar

_OWN, _OTHER = "1", "0"


class TemplateText(str):
    """A ``str`` that also has the origin of each character. Its methods return the same texts as those of ``str``."""

    # The sandbox hides names with an underscore from templates.
    __slots__ = ("_marks",)
    _marks: str

    def __new__(cls, text: str = "") -> Self:
        """Marks nothing as the template's own, since libraries may create one from any text."""
        return _made(cls, text, _OTHER * len(text))

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        # Other types, such as Markup, have an operator of their own.
        return concat((self, other)) if type(other) in _PLAIN else NotImplemented

    def __radd__(self, other: str) -> str:
        return concat((other, self)) if type(other) in _PLAIN else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        return _made(TemplateText, super().__mul__(times), self._marks * times)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        given = values if isinstance(values, tuple) else (values,)
        literals = self.split("%s")
        if len(literals) != len(given) + 1 or any("%" in literal for literal in literals):
            return super().__mod__(values)
        pieces = [literals[0]]
        for value, literal in zip(given, literals[1:], strict=True):
            pieces += (str(value), literal)
        return concat(pieces)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return _made(TemplateText, super().__getitem__(key), self._marks[key])

    def __iter__(self) -> Iterator[str]:
        return (self[at] for at in range(len(self)))

    def join(self, texts: Iterable[str], /) -> str:
        pieces: list[str] = []
        for text in texts:
            pieces += (self, text)
        return concat(pieces[1:])

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> str:
        return self.rstrip(chars).lstrip(chars)

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(super().removesuffix(suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().split(sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().rsplit(sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole = super().splitlines(keepends=True)
        lines, at = [], 0
        for with_end, line in zip(whole, super().splitlines(keepends), strict=True):
            lines.append(self[at : at + len(line)])
            at += len(with_end)
        return lines

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, _ = super().partition(sep)
        end = len(before) + len(found)
        return self[: len(before)], self[len(before) : end], self[end:]

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, _ = super().rpartition(sep)
        end = len(before) + len(found)
        return self[: len(before)], self[len(before) : end], self[end:]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return super().replace(old, new, count)
        pieces: list[str] = []
        for piece in self.split(old, count):
            pieces += (new, piece)
        return concat(pieces[1:])

    def lower(self) -> str:
        return self._in_case(super().lower())

    def upper(self) -> str:
        return self._in_case(super().upper())

    def capitalize(self) -> str:
        return self._in_case(super().capitalize())

    def title(self) -> str:
        return self._in_case(super().title())

    def _in_case(self, text: str) -> str:
        """Keeps the marks if the length is the same: no character becomes shorter in another case."""
        return _made(TemplateText, text, self._marks) if len(text) == len(self) else text

    def _located(self, pieces: list[str], gap: int) -> list[str]:
        """Marks pieces of this text, in order; ``gap`` is the length of their separator, 0 for white space."""
        located, at = [], 0
        for piece in pieces:
            if not gap:
                at = self.index(piece, at)
            located.append(self[at : at + len(piece)])
            at += len(piece) + gap
        return located


_PLAIN = (str, TemplateText)


def own_text(text: str) -> str:
    """Returns a text that is the template's own."""
    return _made(TemplateText, text, _OWN * len(text))


def with_marks(text: str, marks: str) -> str:
    """Returns a text with the ``marks_of`` that another process sent."""
    return _made(TemplateText, text, marks)


def concat(pieces: Iterable[str]) -> str:
    """Joins the pieces."""
    pieces = list(pieces)
    text = "".join(pieces)
    if not any(isinstance(piece, TemplateText) for piece in pieces):
        return text
    return _made(TemplateText, text, "".join(map(marks_of, pieces)))


def runs(text: str) -> Iterator[tuple[str, bool]]:
    """Yields the longest parts of ``text`` with one origin, in order, and whether that is the template."""
    marks, plain, start = marks_of(text), str.__str__(text), 0
    while start < len(marks):
        end = marks.find(_OTHER if marks[start] == _OWN else _OWN, start)
        end = len(marks) if end < 0 else end
        yield plain[start:end], marks[start] == _OWN
        start = end


def marks_of(text: str) -> str:
    """Returns the origin of each character, for ``with_marks``."""
    return text._marks if isinstance(text, TemplateText) else _OTHER * len(text)  # noqa: SLF001 - hidden from templates


_Text = TypeVar("_Text", bound=TemplateText)


def _made(cls: type[_Text], text: str, marks: str) -> _Text:
    made = str.__new__(cls, text)
    made._marks = marks  # noqa: SLF001 - as above
    return made

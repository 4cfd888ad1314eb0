"""Characters whose bytes are spread over several tokens. Knows neither tokens nor stop strings."""

import codecs
from typing import NamedTuple, Protocol

_REPLACEMENT = "\ufffd"


class Joined(NamedTuple):
    """What a further piece made of the pieces joined so far."""

    before: str | None
    """The text of the pieces before this one, if they turn out to end where a character ends; they are done with."""
    text: str | None
    """The text of the pieces that are not done with, this one included, if they end where a character ends."""


class Join(Protocol):
    """Joins the bytes and texts of tokens that come one after the other."""

    def add_piece(self, piece: str | bytes) -> Joined:
        """Takes the next piece; text is whole characters."""
        ...

    def end(self) -> str:
        """The text of the pieces that are not done with, as nothing more will come."""
        ...


class Utf8:
    """A byte-level tokenizer's rule: each longest part of the bytes that cannot be a character is one U+FFFD."""

    def __init__(self) -> None:
        self._text = ""
        self._open = b""
        """The beginning of a character: one to three bytes, after ``_text``."""

    def add_piece(self, piece: str | bytes) -> Joined:
        """See Join."""
        data = piece if isinstance(piece, bytes) else piece.encode()
        before = None
        if self._open and not _continues(self._open, data[:1]):
            before = self.end()
        text, self._open = _decode(self._open + data)
        self._text += text
        if self._open:
            return Joined(before, None)
        text, self._text = self._text, ""
        return Joined(before, text)

    def end(self) -> str:
        """See Join."""
        text = self._text + (_REPLACEMENT if self._open else "")
        self._text, self._open = "", b""
        return text


class ByteRun:
    """SentencePiece's rule: byte tokens in a row are text if together they are UTF-8; else each of them is U+FFFD."""

    def __init__(self) -> None:
        self._run = bytearray()

    def add_piece(self, piece: str | bytes) -> Joined:
        """See Join."""
        if isinstance(piece, bytes):
            self._run += piece
            return Joined(None, None)
        return Joined(self.end() if self._run else None, piece)

    def end(self) -> str:
        """See Join."""
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)


def _continues(beginning: bytes, byte: bytes) -> bool:
    """Whether a character may begin with these bytes."""
    text, rest = _decode(beginning + byte)
    return rest == beginning + byte or (len(text) == 1 and not rest)


def _decode(data: bytes) -> tuple[str, bytes]:
    """The text of the bytes, and what at their end may be the beginning of a character."""
    text, num_decoded = codecs.utf_8_decode(data, "replace", False)
    rest = data[num_decoded:]
    if rest[:1] == b"\xed" and rest[1:] >= b"\xa0":
        # Half of a surrogate pair. CPython waits for its third byte, although no character begins so.
        return text + _REPLACEMENT * 2, b""
    return text, rest

"""Joins characters whose bytes are spread over several tokens, by one of two rules: ``Utf8`` or ``ByteRun``."""

import codecs
from typing import NamedTuple

_REPLACEMENT = "\ufffd"


class Joined(NamedTuple):
    """The text that is complete after another piece."""

    before: str | None
    """The text of the held pieces before this one, if they end where a character ends; they are no longer held."""
    text: str | None
    """The text of the held pieces, including this one, if they end where a character ends."""


class Utf8:
    """A byte-level tokenizer's rule: each longest sequence of bytes that cannot be a character is one U+FFFD."""

    def __init__(self) -> None:
        self._text = ""
        self._open = b""
        """The beginning of a character: one to three bytes, after ``_text``."""

    def add_piece(self, piece: str | bytes) -> Joined:
        """Adds the bytes or text of the next token. A piece that is text is whole characters."""
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
        """Returns the text of the pieces that are still held, at the end of the output."""
        text = self._text + (_REPLACEMENT if self._open else "")
        self._text, self._open = "", b""
        return text


class ByteRun:
    """SentencePiece's rule: consecutive byte tokens are text if together they are UTF-8; else each one is U+FFFD."""

    def __init__(self) -> None:
        self._run = bytearray()

    def add_piece(self, piece: str | bytes) -> Joined:
        if isinstance(piece, bytes):
            self._run += piece
            return Joined(None, None)
        return Joined(self.end() if self._run else None, piece)

    def end(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)


def _continues(beginning: bytes, byte: bytes) -> bool:
    """Returns whether a character may begin with these bytes."""
    text, rest = _decode(beginning + byte)
    return rest == beginning + byte or (len(text) == 1 and not rest)


def _decode(data: bytes) -> tuple[str, bytes]:
    """Returns the text of the bytes, and the bytes at their end that may begin a character."""
    text, num_decoded = codecs.utf_8_decode(data, "replace", False)
    rest = data[num_decoded:]
    if rest[:1] == b"\xed" and rest[1:] >= b"\xa0":
        # Half of a surrogate pair. CPython waits for its third byte, although no character begins with these.
        return text + _REPLACEMENT * 2, b""
    return text, rest

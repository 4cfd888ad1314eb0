"""Input and output of a terminal chat; either may be a pipe."""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TextIO

_DIM, _RED, _PLAIN = "\x1b[2m", "\x1b[31m", "\x1b[0m"
_CONTROLS = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}
_FENCE = '"""'

ReadLine = Callable[[str], str]
"""Shows a prompt and reads a line. Raises EOFError at the end."""


class Screen:
    """Writes answers to standard output and everything else to standard error, so that a pipe gets only answers."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._has_colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self._at_line_start = True
        self._in_reasoning = False

    def reasoning(self, text: str) -> None:
        """Shows a part of the model's reasoning immediately, before its answer."""
        if text:
            self._in_reasoning = True
            text = text.translate(_CONTROLS)
            sys.stderr.write(f"{_DIM}{text}{_PLAIN}" if self._has_colours else text)
            sys.stderr.flush()

    def answer(self, text: str) -> None:
        """Shows a part of an answer immediately, without control characters that a terminal would interpret."""
        if self._is_terminal:
            text = text.translate(_CONTROLS)
        if text:
            self._end_reasoning()
            sys.stdout.write(text)
            sys.stdout.flush()
            self._at_line_start = text.endswith("\n")

    def _end_reasoning(self) -> None:
        if self._in_reasoning:
            self._in_reasoning = False
            print(file=sys.stderr, flush=True)

    def end_answer(self) -> None:
        """Ends the current line, if it is not empty."""
        self._end_reasoning()
        if not self._at_line_start:
            self.answer("\n")

    def note(self, text: str) -> None:
        """Shows a message that is not from the model."""
        self._print(text, _DIM)

    def error(self, text: str) -> None:
        self._print(text, _RED)

    def _print(self, text: str, colour: str) -> None:
        print(f"{colour}{text}{_PLAIN}" if self._has_colours else text, file=sys.stderr, flush=True)


def shows(characters: str, stream: TextIO) -> bool:
    """Whether the stream's encoding has these characters."""
    try:
        characters.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def line_reader() -> ReadLine:
    """Returns a reader of standard input, with editing and a history (until the program ends) on a terminal."""
    if not sys.stdin.isatty():
        return lambda prompt: input()
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - the import enables editing in input()
    return input


def read_message(read_line: ReadLine) -> str:
    """Reads a message: a line, with its continuation after a backslash at its end, or all lines between two lines of
    three double quotes. Raises EOFError at the end."""
    line = read_line("> ")
    lines: list[str] = []
    with contextlib.suppress(EOFError):  # the end of input ends the message
        if line.strip() == _FENCE:
            while (line := read_line(". ")).strip() != _FENCE:
                lines.append(line)
            return "\n".join(lines)
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = ""
            line = read_line(". ")
        lines.append(line)
    return "\n".join(lines)

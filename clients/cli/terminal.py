"""What a terminal chat reads and writes; works as well when either side is a pipe."""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TextIO

_DIM, _RED, _PLAIN = "\x1b[2m", "\x1b[31m", "\x1b[0m"
_CONTROLS = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}
_FENCE = '"""'

ReadLine = Callable[[str], str]
"""Asks for a line, with a prompt. Raises EOFError at the end."""


class Screen:
    """Answers go to standard output as they are; all else goes to standard error, so that a pipe gets answers alone."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._has_colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self._at_line_start = True

    def answer(self, text: str) -> None:
        """Shows a piece of an answer at once. What a terminal would take for commands is left out."""
        if self._is_terminal:
            text = text.translate(_CONTROLS)
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._at_line_start = text.endswith("\n")

    def end_answer(self) -> None:
        """Ends the line, if it has not ended."""
        if not self._at_line_start:
            self.answer("\n")

    def note(self, text: str) -> None:
        """Says something that is not the model's."""
        self._tell(text, _DIM)

    def error(self, text: str) -> None:
        """Says what went wrong."""
        self._tell(text, _RED)

    def _tell(self, text: str, colour: str) -> None:
        print(f"{colour}{text}{_PLAIN}" if self._has_colours else text, file=sys.stderr, flush=True)


def shows(characters: str, stream: TextIO) -> bool:
    """Whether what reads the stream expects an encoding that has these."""
    try:
        characters.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def line_reader() -> ReadLine:
    """Lines of standard input: edited and remembered (until the program ends) where it is a terminal."""
    if not sys.stdin.isatty():
        return lambda prompt: input()
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - being imported is what gives input() its editing
    return input


def read_message(read_line: ReadLine) -> str:
    """A message: a line, with those that it continues in by a backslash at its end, or all lines between two of three
    double quotes. Raises EOFError at the end."""
    line = read_line("> ")
    lines: list[str] = []
    with contextlib.suppress(EOFError):  # an end in the middle ends the message
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

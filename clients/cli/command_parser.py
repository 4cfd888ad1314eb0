"""Parses the commands' arguments and reports invalid ones."""

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_LONG_WORD = re.compile(r"[^\s;:']{200,}")
_MAX_MESSAGE = 2000
_NEGATIVE_NUMBER = re.compile(r"-\.?\d")
_UNRECOGNIZED = "unrecognized arguments: "
_SIMILAR, _VERY_SIMILAR = 0.6, 0.75
"""Similarities by difflib. The second is for flags that may be valid flags of another command."""


def reporting(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wraps a parser of values for argparse, which hides the message of a ValueError."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def number_where(is_allowed: Callable[[float], bool], problem: str) -> Callable[[str], float]:
    """Returns a parser of numbers for argparse. ``problem`` is the error, with ``{0}`` in place of the text."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not is_allowed(value):
            raise argparse.ArgumentTypeError(problem.format(text))
        return value

    return read


def positive(text: str) -> int:
    """Parses a whole number above 0 for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return int(text)


def shortened(message: str) -> str:
    """Removes the middle of a message that is too long to read: an argument may have any length."""
    message = _LONG_WORD.sub(lambda word: f"{word[0][:60]}...", message)
    if len(message) <= _MAX_MESSAGE:
        return message
    return f"{message[: _MAX_MESSAGE * 3 // 4]} ... {message[-_MAX_MESSAGE // 4 :]}"


def nearest(name: str, known: Iterable[str], similarity: float = _SIMILAR) -> str | None:
    """Returns the known flag or key that resembles ``name``."""
    return next(iter(difflib.get_close_matches(name[:100], list(known), 1, similarity)), None)


def misspelt(arguments: Iterable[str], known: Iterable[str], similarity: float = _SIMILAR) -> dict[str, str]:
    """Returns the unknown flags among ``arguments`` that resemble a known one, each with that one."""
    known = list(known)
    flags = [flag for flag in known if flag.startswith("--")]
    found = ((name, nearest(name, flags, similarity)) for name in _unknown_flags(arguments, known))
    return {name: near for name, near in found if near is not None}


def _unknown_flags(arguments: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    """Yields the names of the flags among ``arguments`` that are not in ``known``."""
    names = set(known)
    for argument in arguments:
        if argument == "--":
            return
        name = argument.partition("=")[0]
        is_flag = len(name) > 1 and name.startswith("-") and " " not in name and not _NEGATIVE_NUMBER.match(name)
        if is_flag and name not in names:
            yield name


class CommandParser(argparse.ArgumentParser):
    """The arguments of ``penstock NAME``. Flags cannot be abbreviated, the epilog is shown unchanged, and an error is
    one line, not a page of usage."""

    def __init__(self, name: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=f"penstock {name}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._arguments: list[str] = []
        self._takes_others = True

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse's method: refuses unknown arguments."""
        self._takes_others = False
        return super().parse_args(args, namespace)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse's method. Keeps the arguments: argparse reports missing flags before unknown ones, although a
        flag is often missing because it was misspelt."""
        self._arguments = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2."""
        text = message.removeprefix("argument ")
        text = text.replace("invalid int value: ", "must be a whole number; it is ")
        text = text.replace("invalid float value: ", "must be a number; it is ")
        unknown = list(_unknown_flags(self._arguments, self._option_string_actions))
        if unknown and not self._takes_others and "required" in text:
            text = f"{_UNRECOGNIZED}{' '.join(unknown)}"
        near = self.misspelt_flags()
        if near and text.startswith(_UNRECOGNIZED):
            text = f"{shortened(text)}; did you mean {' and '.join(dict.fromkeys(near.values()))}?"
        else:
            text += "".join(f"; did you mean {flag} instead of {name}?" for name, flag in near.items())
        self.exit(2, f"{self.prog}: {shortened(text)}; {self.prog} --help lists the flags\n")

    def misspelt_flags(self) -> dict[str, str]:
        """Maps each unknown flag that resembles a known one to that known flag."""
        similarity = _VERY_SIMILAR if self._takes_others else _SIMILAR
        return misspelt(self._arguments, self._option_string_actions, similarity)

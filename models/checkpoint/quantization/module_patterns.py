"""Matches the regular expressions of a config.json. They are untrusted, so the time that they may take is limited."""

import re
import time
from collections.abc import Iterable

from penstock.models.errors import ModelError

MAX_CHARS = 1024
MAX_COST = 10_000_000
"""The maximum number of ways to try an expression on a name: repeats, options and alternatives multiply."""
MAX_TOTAL_S = 5.0
"""The limit of CPU time for matching all expressions of a model against all of its modules."""
_NAME_CHARS = 64
"""The assumed number of times that a part repeats in a module's name."""
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[P<:=!]?|[()|]|(?:[*+?]|\{[0-9,]+\})[?+]?|.", re.DOTALL)


class Patterns:
    """Regular expressions that are tried one after the other."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        """Raises ``re.error``."""
        self._patterns = tuple(map(_compiled, texts))
        self._spent_s = 0.0

    def match(self, name: str) -> bool:
        """Whether one of them matches the beginning of a module's name. Raises ModelError if this takes too long."""
        for pattern in self._patterns:
            began = time.thread_time()
            is_match = pattern.match(name) is not None
            self._spent_s += time.thread_time() - began
            if self._spent_s > MAX_TOTAL_S:
                raise ModelError(
                    "config.json: quantization_config: its regular expressions take too long: simplify them"
                )
            if is_match:
                return True
        return False


class ModulePatterns:
    """Names of modules in compressed-tensors' notation: whole names, classes, and regular expressions after ``re:``."""

    def __init__(self, names: Iterable[str]) -> None:
        """Raises ``re.error``."""
        names = tuple(names)
        self._exact = frozenset(name for name in names if not name.startswith("re:"))
        self._patterns = Patterns(tuple(name[3:] for name in names if name.startswith("re:")))

    def __contains__(self, module: str) -> bool:
        return self.precision(module) is not None

    def precision(self, module: str) -> int | None:
        """How precisely the linear of this name is matched, in compressed-tensors' order: 0 by its whole name, 1 by an
        expression, 2 by its class; None: not matched."""
        if module in self._exact:
            return 0
        if self._patterns.match(module):
            return 1
        return 2 if "Linear" in self._exact else None


def _compiled(text: str) -> "re.Pattern[str]":
    if len(text) > MAX_CHARS:
        raise re.error(f"it has more than {MAX_CHARS} characters")
    if _cost(text) > MAX_COST:
        raise re.error("it repeats too much")
    try:
        return re.compile(text)
    except (OverflowError, RecursionError):
        raise re.error("it is too large") from None


def _cost(text: str) -> int:
    """An upper bound for the number of ways to try an expression. A group that repeats counts as too many."""
    cost, alternatives = 1, [1]
    tokens = _TOKEN.findall(text)
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        if token.startswith("("):
            alternatives.append(1)
        elif token == "|":
            alternatives[-1] += 1
        elif token == ")" and len(alternatives) > 1:
            cost *= alternatives.pop()
            if following[:1] in ("*", "+", "{"):
                return MAX_COST + 1
        elif token[0] in "*+" or (token[0] == "{" and len(token) > 1):
            cost *= _NAME_CHARS
        elif token[0] == "?":
            cost *= 2
    return cost * alternatives[0]

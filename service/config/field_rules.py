"""The kinds of bounds that a field's value may have. Each looks at what is there, and allocates nothing in proportion
to it. Knows no message of the contract."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from penstock.service.config.text_size import utf8_bytes

MAX_IDS_ON_LOOP = 4096
"""Longer lists of ids have their values checked where the request is prepared, off the event loop."""

MAX_UNCUT_IDS = 1 << 20
"""Of a prompt that is truncated; more where the model's context is longer."""


class Limit(Enum):
    """A bound that the served model sets."""

    PROMPT = auto()
    """The most tokens of a prompt, or of an output: the context, less one for the other."""
    CONTEXT = auto()
    """The most tokens of what has no output."""
    UNCUT = auto()
    """The most tokens of a prompt before it is truncated."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model can take."""

    vocab_size: int
    """The smaller of the tokenizer's and the model's."""
    max_model_len: int

    def resolve(self, bound: float | Limit) -> float:
        """The number that a bound stands for."""
        if bound is Limit.UNCUT:
            return max(self.max_model_len, MAX_UNCUT_IDS)
        if isinstance(bound, Limit):
            return self.max_model_len - (bound is Limit.PROMPT)
        return bound


class Problem(NamedTuple):
    """What is wrong with a value, and at which place in it."""

    text: str
    at: str = ""
    """Added to the field's path: ``[3]`` or ``[3].role``."""
    exceeds_context: bool = False
    """Whether it is more than the served model can take: another model may."""

    def inside(self, place: str) -> "Problem":
        """The same, of what holds the value at ``place``."""
        return self._replace(at=place + self.at)


class Bound(Protocol):
    """What a field's value must keep to."""

    @property
    def required(self) -> bool:
        """Whether the field must be set."""
        ...

    def problem(self, value: Any, limits: ModelLimits) -> Problem | None:
        """What is wrong with ``value``; None if nothing is."""
        ...


@dataclass(frozen=True, slots=True)
class Free:
    """Any value of the field's type, and all of them are few: a bool."""

    required: bool = False

    def problem(self, value: Any, limits: ModelLimits) -> Problem | None:
        """Nothing can be wrong with it."""
        return None


@dataclass(frozen=True, slots=True)
class Known:
    """A number that the enum knows."""

    numbers: frozenset[int]
    required: bool = False

    def problem(self, value: int, limits: ModelLimits) -> Problem | None:
        """Enums are open on the wire, so any number may arrive."""
        if value in self.numbers:
            return None
        return Problem(f"must be one of the enum's values, {_listed(self.numbers)}; it is {value}")


@dataclass(frozen=True, slots=True)
class Number:
    """``low <= value <= high``; neither NaN nor infinite."""

    low: float
    high: float | Limit
    required: bool = False

    def problem(self, value: float, limits: ModelLimits) -> Problem | None:
        """NaN compares false with everything, and so is refused."""
        high = limits.resolve(self.high)
        if self.low <= value <= high:
            return None
        text = f"must be at least {_shown(self.low)} and at most {high:,}; it is {_shown(value)}"
        return Problem(text, exceeds_context=isinstance(self.high, Limit) and value > high)


@dataclass(frozen=True, slots=True)
class Text:
    """``low`` to ``high`` bytes of UTF-8, all of it matching ``pattern``."""

    low: int
    high: int
    pattern: re.Pattern[str] | None = None
    allowed: str = ""
    """What the pattern asks for, in words."""
    required: bool = False

    def problem(self, value: str, limits: ModelLimits) -> Problem | None:
        """The text itself is never repeated in the answer."""
        num_bytes = utf8_bytes(value)
        if not self.low <= num_bytes <= self.high:
            wanted = f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"
            return Problem(f"must be {wanted} bytes long; it has {num_bytes:,}")
        if self.pattern is not None and not self.pattern.fullmatch(value):
            return Problem(f"must be {self.allowed}")
        return None


@dataclass(frozen=True, slots=True)
class Items:
    """At most ``high`` items, each within ``each``."""

    high: int
    each: Bound
    required: bool = False

    def problem(self, value: Sequence[Any], limits: ModelLimits) -> Problem | None:
        """The first item that is out of bounds is named."""
        if len(value) > self.high:
            return Problem(f"at most {self.high:,} items; it has {len(value):,}")
        for index, item in enumerate(value):
            found = self.each.problem(item, limits)
            if found is not None:
                return found.inside(f"[{index}]")
        return None


@dataclass(frozen=True, slots=True)
class Refs:
    """At most ``high`` numbers of the client's own, any of them."""

    high: int
    required: bool = False

    def problem(self, value: Sequence[int], limits: ModelLimits) -> Problem | None:
        """The numbers mean nothing to us."""
        return None if len(value) <= self.high else Problem(f"at most {self.high:,} refs; it has {len(value):,}")


@dataclass(frozen=True, slots=True)
class Ids:
    """At most ``high`` token ids, each below the vocabulary size; the values of long lists are looked at later."""

    high: int | Limit
    required: bool = False

    def problem(self, value: Sequence[int], limits: ModelLimits) -> Problem | None:
        """The length is checked first, so that a long list costs nothing."""
        found = too_many_ids(value, self.high, limits)
        if found is not None or len(value) > MAX_IDS_ON_LOOP:
            return found
        return foreign_id(value, limits.vocab_size)


@dataclass(frozen=True, slots=True)
class Biases:
    """At most ``high`` entries; ids below the vocabulary size, values from ``-most`` to ``most``."""

    high: int
    most: float
    required: bool = False

    def problem(self, value: Mapping[int, float], limits: ModelLimits) -> Problem | None:
        """Keys and values both."""
        if len(value) > self.high:
            return Problem(f"at most {self.high:,} entries; it has {len(value):,}")
        for token_id, bias in value.items():
            if token_id >= limits.vocab_size:
                return Problem(f"must be an id below the vocabulary size, {limits.vocab_size:,}", f"[{token_id}]")
            if not abs(bias) <= self.most:
                return Problem(f"must be -{self.most:g} to {self.most:g}; it is {bias:g}", f"[{token_id}]")
        return None


@dataclass(frozen=True, slots=True)
class NestedIds:
    """A list of ids in a message of its own, with another bound than the message has elsewhere. There may be thousands
    of such lists: their values are looked at where the request is prepared."""

    high: int | Limit
    required: bool = False

    def problem(self, value: Any, limits: ModelLimits) -> Problem | None:
        """The length alone."""
        found = too_many_ids(value.ids, self.high, limits)
        return None if found is None else found.inside(".ids")


@dataclass(frozen=True, slots=True)
class Texts:
    """At most ``high`` texts, none of them empty, together at most ``max_bytes`` of UTF-8."""

    high: int
    max_bytes: int
    required: bool = False

    def problem(self, value: Sequence[str], limits: ModelLimits) -> Problem | None:
        """Each text, then their sum."""
        found = Items(self.high, Text(1, self.max_bytes)).problem(value, limits)
        if found is not None:
            return found
        total = sum(map(utf8_bytes, value))
        if total > self.max_bytes:
            return Problem(f"together at most {self.max_bytes:,} bytes; they have {total:,}")
        return None


def foreign_id(ids: Sequence[int], vocab_size: int) -> Problem | None:
    """What is wrong with the first id that names no token; takes 10 ms for a million ids."""
    if not ids or max(ids) < vocab_size:
        return None
    index = next(index for index, token_id in enumerate(ids) if token_id >= vocab_size)
    return Problem(f"must be below the vocabulary size, {vocab_size:,}; it is {ids[index]:,}", f"[{index}]")


def too_many_ids(ids: Sequence[int], high: int | Limit, limits: ModelLimits) -> Problem | None:
    """What is wrong with a list that has more than ``high`` ids."""
    most = limits.resolve(high)
    if len(ids) <= most:
        return None
    return Problem(f"at most {most:,} ids; it has {len(ids):,}", exceeds_context=isinstance(high, Limit))


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))

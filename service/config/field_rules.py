"""The kinds of bounds on a field's value, independent of any message. A check allocates nothing in proportion to the
value."""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from penstock.service.config.durations import MAX_SECONDS, is_valid, to_seconds
from penstock.service.config.text_size import utf8_bytes
from penstock.service.errors import Reason

MAX_IDS_ON_LOOP = 4096
"""The values of longer lists of ids are checked when the request is prepared, off the event loop."""

MAX_UNCUT_IDS = 1 << 20
"""Limit on the ids of a prompt that is truncated, or the model's context if that is longer."""


class Limit(Enum):
    """A bound that depends on the served model."""

    PROMPT = auto()
    """Limit on the tokens of a prompt, or of an output: the context, minus one for the other."""
    CONTEXT = auto()
    """Limit on the tokens of an input without an output."""
    UNCUT = auto()
    """Limit on the tokens of a prompt before it is truncated."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the served model."""

    vocab_size: int
    """The smaller of the tokenizer's and the model's vocabulary."""
    max_model_len: int
    model_name: str = ""
    """The name that requests may give."""
    adapters: Container[str] = ()
    """The names of LoRA adapters, which requests may give instead. Which tenant may use which is checked later."""

    def resolve(self, bound: float | Limit) -> float:
        if bound is Limit.UNCUT:
            return max(self.max_model_len, MAX_UNCUT_IDS)
        if isinstance(bound, Limit):
            return self.max_model_len - (bound is Limit.PROMPT)
        return bound


class Problem(NamedTuple):
    """What is wrong with a value, and where in it."""

    text: str
    at: str = ""
    """Appended to the field's path: ``[3]`` or ``[3].role``."""
    reason: Reason = Reason.INVALID_FIELD
    """CONTEXT_LENGTH if the value exceeds a limit of the served model; another model may accept it."""

    def inside(self, place: str) -> "Problem":
        """Returns the same problem for a value that has this one at ``place``."""
        return self._replace(at=place + self.at)


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound on a field's value. This one allows any value of the field's type, such as a bool."""

    required: bool = field(default=False, kw_only=True)
    """Whether the field must be set."""

    def problem(self, value: Any, limits: ModelLimits) -> Problem | None:
        """Returns what is wrong with ``value``; None if it is within the bound."""
        return None


@dataclass(frozen=True, slots=True)
class Known(Bound):
    """A value that the enum has."""

    numbers: frozenset[int]

    def problem(self, value: int, limits: ModelLimits) -> Problem | None:
        """Refuses unknown values: enums are open on the wire, so any number may arrive."""
        if value in self.numbers:
            return None
        return Problem(f"must be one of the enum's values, {', '.join(map(str, sorted(self.numbers)))}; it is {value}")


@dataclass(frozen=True, slots=True)
class Number(Bound):
    """``low <= value <= high``; neither NaN nor infinite."""

    low: float
    high: float | Limit

    def problem(self, value: float, limits: ModelLimits) -> Problem | None:
        """Refuses NaN too, since it compares false with everything."""
        high = limits.resolve(self.high)
        if self.low <= value <= high:
            return None
        text = f"must be at least {_shown(self.low)} and at most {high:,}; it is {_shown(value)}"
        is_of_model = isinstance(self.high, Limit) and value > high
        return Problem(text, reason=Reason.CONTEXT_LENGTH if is_of_model else Reason.INVALID_FIELD)


@dataclass(frozen=True, slots=True)
class Span(Bound):
    """A Duration of ``low`` to ``high`` seconds."""

    low: float
    high: float = MAX_SECONDS

    def problem(self, value: Duration, limits: ModelLimits) -> Problem | None:
        if not is_valid(value):
            return Problem("must be a valid Duration: nanos below 10^9, and of the same sign as seconds")
        if round(self.low * 1e9) <= value.ToNanoseconds() <= round(self.high * 1e9):
            return None
        text = f"must be at least {self.low:,g} s and at most {self.high:,} s; it is {to_seconds(value):,.9g} s"
        return Problem(text)


@dataclass(frozen=True, slots=True)
class MaskPaths(Bound):
    """At most ``high`` paths of a FieldMask, each one of ``names`` or ``*``."""

    high: int
    names: tuple[str, ...]

    def problem(self, value: FieldMask, limits: ModelLimits) -> Problem | None:
        if len(value.paths) > self.high:
            return Problem(f"at most {self.high:,} paths; it has {len(value.paths):,}", ".paths")
        for index, path in enumerate(value.paths):
            if path != "*" and path not in self.names:
                return Problem(f"must be one of {', '.join(self.names)}, or *; it is {path[:64]!a}", f".paths[{index}]")
        return None


@dataclass(frozen=True, slots=True)
class Text(Bound):
    """``low`` to ``high`` bytes of UTF-8 that match ``pattern`` from beginning to end."""

    low: int
    high: int
    pattern: re.Pattern[str] | None = None
    allowed: str = ""
    """The pattern in words."""

    def problem(self, value: str, limits: ModelLimits) -> Problem | None:
        """Never repeats the text itself."""
        num_bytes = utf8_bytes(value)
        if not self.low <= num_bytes <= self.high:
            wanted = f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"
            return Problem(f"must be {wanted} bytes long; it has {num_bytes:,}")
        if self.pattern is not None and not self.pattern.fullmatch(value):
            return Problem(f"must be {self.allowed}")
        return None


class ServedModel(Text):
    """The name of the served model or of an adapter, or an empty text for the only model."""

    def problem(self, value: str, limits: ModelLimits) -> Problem | None:
        if value == limits.model_name or value in limits.adapters:
            return None
        unserved = f"no model of this name is served here; leave it empty, or send {limits.model_name}"
        return super().problem(value, limits) or Problem(unserved, reason=Reason.MODEL_NOT_FOUND)


@dataclass(frozen=True, slots=True)
class Data(Bound):
    """At most ``high`` bytes."""

    high: int

    def problem(self, value: bytes, limits: ModelLimits) -> Problem | None:
        return None if len(value) <= self.high else Problem(f"at most {self.high:,} bytes; it has {len(value):,}")


@dataclass(frozen=True, slots=True)
class Unsupported(Bound):
    """A field of the contract that this service does not support, whatever its value."""

    text: str
    """What is wrong, and what would be right."""

    def problem(self, value: Any, limits: ModelLimits) -> Problem | None:
        return Problem(self.text)


@dataclass(frozen=True, slots=True)
class Items(Bound):
    """At most ``high`` items, each within the bound ``each``."""

    high: int
    each: Bound

    def problem(self, value: Sequence[Any], limits: ModelLimits) -> Problem | None:
        if len(value) > self.high:
            return Problem(f"at most {self.high:,} items; it has {len(value):,}")
        for index, item in enumerate(value):
            found = self.each.problem(item, limits)
            if found is not None:
                return found.inside(f"[{index}]")
        return None


@dataclass(frozen=True, slots=True)
class Refs(Bound):
    """At most ``high`` numbers that the client chooses freely."""

    high: int

    def problem(self, value: Sequence[int], limits: ModelLimits) -> Problem | None:
        return None if len(value) <= self.high else Problem(f"at most {self.high:,} refs; it has {len(value):,}")


@dataclass(frozen=True, slots=True)
class Ids(Bound):
    """At most ``high`` token ids, each below the vocabulary size. The values of long lists are checked later."""

    high: int | Limit

    def problem(self, value: Sequence[int], limits: ModelLimits) -> Problem | None:
        """Checks the length first, so that a long list costs nothing."""
        found = too_many_ids(value, self.high, limits)
        if found is not None or len(value) > MAX_IDS_ON_LOOP:
            return found
        return foreign_id(value, limits.vocab_size)


@dataclass(frozen=True, slots=True)
class Biases(Bound):
    """At most ``high`` entries; ids below the vocabulary size, values from ``-most`` to ``most``."""

    high: int
    most: float

    def problem(self, value: Mapping[int, float], limits: ModelLimits) -> Problem | None:
        if len(value) > self.high:
            return Problem(f"at most {self.high:,} entries; it has {len(value):,}")
        for token_id, bias in value.items():
            if token_id >= limits.vocab_size:
                return Problem(f"must be an id below the vocabulary size, {limits.vocab_size:,}", f"[{token_id}]")
            if not abs(bias) <= self.most:
                return Problem(f"must be -{self.most:g} to {self.most:g}; it is {bias:g}", f"[{token_id}]")
        return None


@dataclass(frozen=True, slots=True)
class NestedIds(Bound):
    """A list of ids in a message of its own, with a different bound than the message has elsewhere. There may be
    thousands of such lists: their values are checked when the request is prepared."""

    high: int | Limit

    def problem(self, value: Any, limits: ModelLimits) -> Problem | None:
        found = too_many_ids(value.ids, self.high, limits)
        return None if found is None else found.inside(".ids")


@dataclass(frozen=True, slots=True)
class Texts(Bound):
    """At most ``high`` non-empty texts of ``max_bytes`` of UTF-8 in total."""

    high: int
    max_bytes: int

    def problem(self, value: Sequence[str], limits: ModelLimits) -> Problem | None:
        found = Items(self.high, Text(1, self.max_bytes)).problem(value, limits)
        if found is not None:
            return found
        total = sum(map(utf8_bytes, value))
        if total > self.max_bytes:
            return Problem(f"together at most {self.max_bytes:,} bytes; they have {total:,}")
        return None


def foreign_id(ids: Sequence[int], vocab_size: int) -> Problem | None:
    """Returns what is wrong with the first id that names no token. Takes 10 ms for a million ids."""
    if not ids or max(ids) < vocab_size:
        return None
    index = next(index for index, token_id in enumerate(ids) if token_id >= vocab_size)
    return Problem(f"must be below the vocabulary size, {vocab_size:,}; it is {ids[index]:,}", f"[{index}]")


def too_many_ids(ids: Sequence[int], high: int | Limit, limits: ModelLimits) -> Problem | None:
    """Returns what is wrong with a list of more than ``high`` ids."""
    most = limits.resolve(high)
    if len(ids) <= most:
        return None
    reason = Reason.CONTEXT_LENGTH if isinstance(high, Limit) else Reason.INVALID_FIELD
    return Problem(f"at most {most:,} ids; it has {len(ids):,}", reason=reason)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"

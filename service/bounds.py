"""The bounds of every field of every request message, as data, and the one validator that walks them.

What the protos' comments promise stands here once more, in a form that runs; a test walks the descriptors, so that a
new field without a bound fails. A check looks at what is there: nothing is allocated in proportion to what a request
asks for.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from google.protobuf.message import Message

from penstock.scheduler.config import MAX_REQUEST_RATE, MAX_TOKEN_BUDGET, MIN_REQUEST_RATE
from penstock.service.errors import invalid
from penstock.service.identity import TENANT_NAME
from penstock.service.text_size import MAX_TEXT_BYTES, utf8_bytes

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
MAX_TIMEOUT_MS = 86_400_000
MAX_DETOKENIZED_IDS = 1 << 20
MAX_DESCRIBED_IDS = 1 << 16
MAX_NAMED_TENANTS = 16_384
"""With settings of their own: all of them fit in one message."""
MAX_TOKENS_CAP = 1 << 24
MAX_LIVE_REQUESTS_CAP = 1 << 20
MAX_IDS_ON_LOOP = 4096
"""Longer lists of ids have their values checked where the request is prepared, off the event loop."""


class Limit(Enum):
    """A bound that the served model sets."""

    PROMPT = auto()
    """The most tokens of a prompt, or of an output: the context, less one for the other."""
    CONTEXT = auto()
    """The most tokens of what has no output."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model can take."""

    vocab_size: int
    """The tokenizer's, not the rows of the logits."""
    max_model_len: int

    def resolve(self, bound: float | Limit) -> float:
        """The number that a bound stands for."""
        if isinstance(bound, Limit):
            return self.max_model_len - (bound is Limit.PROMPT)
        return bound


class Problem(NamedTuple):
    """What is wrong with a value, and at which place in it."""

    text: str
    at: str = ""
    """Added to the field's path: ``[3]`` or ``[3].role``."""


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
    """``low <= value <= high``, or ``low < value <= high``; neither NaN nor infinite."""

    low: float
    high: float | Limit
    above_low: bool = False
    required: bool = False

    def problem(self, value: float, limits: ModelLimits) -> Problem | None:
        """NaN compares false with everything, and so is refused."""
        high = limits.resolve(self.high)
        if (self.low < value if self.above_low else self.low <= value) and value <= high:
            return None
        floor = "above" if self.above_low else "at least"
        return Problem(f"must be {floor} {_shown(self.low)} and at most {high:,}; it is {_shown(value)}")


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
                return Problem(found.text, f"[{index}]{found.at}")
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
        high = limits.resolve(self.high)
        if len(value) > high:
            return Problem(f"at most {high:,} ids; it has {len(value):,}")
        if len(value) > MAX_IDS_ON_LOOP:
            return None
        return _foreign_id(value, limits.vocab_size)


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
class Nested:
    """A message with bounds of its own."""

    required: bool = False

    def problem(self, value: Message, limits: ModelLimits) -> Problem | None:
        """Walks the message's own fields."""
        return _walk(value, limits)


@dataclass(frozen=True, slots=True)
class NestedIds:
    """A list of ids in a message of its own, with other bounds than the message has elsewhere."""

    ids: Ids
    required: bool = False

    def problem(self, value: Any, limits: ModelLimits) -> Problem | None:
        """Looks at the list."""
        found = self.ids.problem(value.ids, limits)
        return None if found is None else Problem(found.text, f".ids{found.at}")


def chat_bytes(messages: Iterable[Any]) -> int:
    """What the long texts of chat messages have in all."""
    return sum(
        utf8_bytes(message.content) + sum(utf8_bytes(call.arguments) for call in message.tool_calls)
        for message in messages
    )


@dataclass(frozen=True, slots=True)
class Messages:
    """At most ``high`` chat messages, their texts together at most ``max_bytes``."""

    high: int
    max_bytes: int
    required: bool = False

    def problem(self, value: Sequence[Any], limits: ModelLimits) -> Problem | None:
        """Each message, then their sum."""
        found = Items(self.high, Nested()).problem(value, limits)
        if found is not None:
            return found
        total = chat_bytes(value)
        if total > self.max_bytes:
            return Problem(f"the messages together at most {self.max_bytes:,} bytes; they have {total:,}")
        return None


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


_PRINTABLE = re.compile(r"[\x20-\x7e]*")
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

_HUNDREDTH = 0.009999999776482582
"""0.01, as a float of the wire has it."""
_UINT32 = Number(0, UINT32_MAX)
_FLAG = Free()
_TENANT = Text(1, 64, TENANT_NAME, "letters, digits, '_', '.' and '-' alone")
_TRACE = Text(55, 55, _TRACEPARENT, "W3C trace context, 00-<trace id>-<span id>-<flags> in lower-case hex")
_CLIENT_ID = Text(1, 128, _PRINTABLE, "printable ASCII")

FIELD_BOUNDS: Mapping[str, Mapping[str, Bound]] = {
    "GenerateOneRequest": {"start": Nested(required=True)},
    "CompleteRequest": {"start": Nested(required=True)},
    "GenerateRequest": {"start": Nested(), "cancel": Nested(), "update": Nested()},
    "Start": {
        "ref": _UINT32,
        "text": Text(0, MAX_TEXT_BYTES),
        "token_ids": Nested(),
        "chat": Nested(),
        "continue_from": Text(1, 64),
        "sampling": Nested(),
        "output": Nested(),
        "timeout_ms": Number(1, MAX_TIMEOUT_MS),
        "priority": Number(-1000, 1000),
        "tenant": _TENANT,
        "traceparent": _TRACE,
        "client_request_id": _CLIENT_ID,
        "retain_ms": Number(0, MAX_TIMEOUT_MS),
    },
    "TokenIds": {"ids": Ids(Limit.PROMPT, required=True)},
    "Chat": {
        "messages": Messages(4096, MAX_TEXT_BYTES, required=True),
        "add_generation_prompt": _FLAG,
        "tools": Texts(128, MAX_TEXT_BYTES),
        "template_variables": Text(1, 64 << 10),
        "continue_final_message": _FLAG,
    },
    "ChatMessage": {
        "role": Text(1, 64, required=True),
        "content": Text(0, MAX_TEXT_BYTES),
        "tool_calls": Items(128, Nested()),
        "tool_call_id": Text(1, 256),
        "name": Text(1, 256),
    },
    "ToolCall": {"id": Text(1, 256), "name": Text(1, 256, required=True), "arguments": Text(0, MAX_TEXT_BYTES)},
    "Sampling": {
        "temperature": Number(0, 100),
        "top_k": Number(0, 1_000_000),
        "top_p": Number(0, 1, above_low=True),
        "min_p": Number(0, 1),
        "repetition_penalty": Number(_HUNDREDTH, 100),
        "presence_penalty": Number(-2, 2),
        "frequency_penalty": Number(-2, 2),
        "seed": Number(0, UINT64_MAX),
        "max_tokens": Number(1, Limit.PROMPT),
        "min_tokens": Number(0, Limit.PROMPT),
        "stop": Items(64, Text(1, 1024)),
        "stop_token_ids": Ids(256),
        "ignore_eos": _FLAG,
        "logit_bias": Biases(1024, 100),
        "allowed_token_ids": Ids(65_536),
        "bad_words": Items(256, Text(1, 256)),
        "n": Number(1, 64),
    },
    "Output": {
        "format": Known(frozenset({0, 1, 2, 3})),
        "logprobs": Number(0, 20),
        "prompt_logprobs": Number(0, 20),
        "include_special_tokens": _FLAG,
    },
    "Cancel": {"refs": Refs(65_536)},
    "Update": {
        "ref": _UINT32,
        "timeout_ms": Number(1, MAX_TIMEOUT_MS),
        "priority": Number(-1000, 1000),
        "max_tokens": Number(1, Limit.PROMPT),
    },
    "EmbedRequest": {
        "inputs": Items(2048, Nested(), required=True),
        "dimensions": Number(1, UINT32_MAX),
        "normalize": _FLAG,
        "priority": Number(-1000, 1000),
        "tenant": _TENANT,
        "traceparent": _TRACE,
        "client_request_id": _CLIENT_ID,
    },
    "EmbedInput": {"text": Text(0, MAX_TEXT_BYTES), "token_ids": NestedIds(Ids(Limit.CONTEXT))},
    "GetModelRequest": {},
    "TokenizeRequest": {"text": Text(0, MAX_TEXT_BYTES), "add_special_tokens": _FLAG},
    "DetokenizeRequest": {"token_ids": Ids(MAX_DETOKENIZED_IDS), "include_special_tokens": _FLAG},
    "DescribeTokensRequest": {"token_ids": Ids(MAX_DESCRIBED_IDS)},
    "RenderChatRequest": {"chat": Nested(required=True)},
    "WatchStatsRequest": {"interval_ms": Number(100, 3_600_000)},
    "DrainRequest": {},
    "ResumeRequest": {},
    "FlushCacheRequest": {},
    "GetSettingsRequest": {},
    "UpdateSettingsRequest": {
        "policy": Known(frozenset({0, 1, 2, 3, 4})),
        "max_num_seqs": Number(1, UINT32_MAX),
        "max_num_batched_tokens": Number(1, UINT32_MAX),
        "max_queued_requests": Number(1, 1 << 20),
        "max_queued_tokens": Number(1, 1 << 32),
        "target_itl_ms": Number(0, 60_000),
        "default_tenant": Nested(),
        "tenants": Items(1024, Nested()),
        "forget_tenants": Items(1024, _TENANT),
    },
    "TenantSettings": {
        "tenant": _TENANT,
        "weight": Number(0.001, 1000),
        "max_prompt_tokens": Number(1, MAX_TOKENS_CAP),
        "max_tokens": Number(1, MAX_TOKENS_CAP),
        "max_live_requests": Number(1, MAX_LIVE_REQUESTS_CAP),
        "requests_per_second": Number(MIN_REQUEST_RATE, MAX_REQUEST_RATE),
        "tokens_per_minute": Number(1, MAX_TOKEN_BUDGET),
    },
    "ExplainRequest": {"request_id": Text(1, 64, required=True)},
    "WatchKvEventsRequest": {"after_sequence": Number(0, UINT64_MAX), "stream_id": Text(1, 64)},
}
"""By message and field; what a field that is not set stands for is within its bound by definition."""

_REQUIRED: Mapping[str, frozenset[str]] = {
    name: frozenset(field for field, bound in fields.items() if bound.required) for name, fields in FIELD_BOUNDS.items()
}


class Validator:
    """Holds messages against the bounds. Cheap enough for the event loop."""

    def __init__(self, limits: ModelLimits) -> None:
        self.limits = limits

    def check(self, message: Message) -> None:
        """Raises ServiceError INVALID_FIELD, with the path of the first field that is out of its bound."""
        found = _walk(message, self.limits)
        if found is not None:
            raise invalid(found.at.removeprefix("."), found.text)

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Holds the ids of a list of any length against the vocabulary; takes 10 ms for a million."""
        found = _foreign_id(ids, self.limits.vocab_size)
        if found is not None:
            raise invalid(field + found.at, found.text)


def _walk(message: Message, limits: ModelLimits) -> Problem | None:
    name = message.DESCRIPTOR.name
    bounds = FIELD_BOUNDS[name]
    missing = set(_REQUIRED[name])
    for descriptor, value in message.ListFields():
        field = descriptor.name
        found = bounds[field].problem(value, limits)
        if found is not None:
            return Problem(found.text, f".{field}{found.at}")
        missing.discard(field)
    if missing:
        return Problem("is required", f".{min(missing)}")
    return None


def _foreign_id(ids: Sequence[int], vocab_size: int) -> Problem | None:
    if not ids or max(ids) < vocab_size:
        return None
    index = next(index for index, token_id in enumerate(ids) if token_id >= vocab_size)
    return Problem(f"must be below the vocabulary size, {vocab_size:,}; it is {ids[index]:,}", f"[{index}]")


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))

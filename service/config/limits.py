"""The bounds of every field of every request message, as data, and the validator that checks them.

These are the bounds in the protos' comments. A test walks the descriptors, and fails for a field without a bound. A
check allocates nothing in proportion to the values of a request.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from penstock.scheduler.config import MAX_REQUEST_RATE, MAX_TOKEN_BUDGET, MIN_REQUEST_RATE
from penstock.service.config.field_rules import (
    Biases,
    Bound,
    Data,
    Ids,
    Items,
    Known,
    Limit,
    MaskPaths,
    ModelLimits,
    NestedIds,
    Number,
    Problem,
    Refs,
    ServedModel,
    Span,
    Text,
    Texts,
    Unsupported,
    foreign_id,
    too_many_ids,
)
from penstock.service.config.speculative import MAX_DRAFTS
from penstock.service.config.text_size import MAX_TEXT_BYTES, utf8_bytes
from penstock.service.errors import invalid

UINT32_MAX = 2**32 - 1
INT64_MAX = 2**63 - 1
MAX_TIMEOUT_MS = 86_400_000
MAX_CONNECTIONS = 4096
"""Default limit for the callers' listener; the limit of open files may lower it."""
TENANT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_DETOKENIZED_IDS = 1 << 20
MAX_DESCRIBED_IDS = 1 << 16
MAX_NAMED_TENANTS = 16_384
"""Limit on tenants with settings of their own, so that all of them fit in one message."""
MAX_TOKENS_CAP = 1 << 24
MAX_LIVE_REQUESTS_CAP = 1 << 20
MAX_LISTED_REQUESTS = 1000
"""Limit on the requests in a page, and on the ids of one cancellation."""
MAX_RESUMED_TOKENS = 1 << 17
"""Limit on the received tokens of a request that is resumed, of all its choices: they take up to some seconds of a
tokenizer's thread."""
MAX_TICKET_BYTES = 128
MAX_CHOICES, MAX_TOP_LOGPROBS, MAX_BIASES = 64, 20, 1024
MAX_STOPS, MAX_STOP_IDS = 64, 256
MAX_GRAMMAR_BYTES = 256 << 10
MAX_REGEX_BYTES = 64 << 10
MAX_CHAT_MESSAGES = 4096
MAX_INNER_PARTS = 4096
"""Limit on the tool calls of all messages of a conversation, and on the parts of their contents: each is a message that
is checked on the event loop."""


@dataclass(frozen=True, slots=True)
class Nested(Bound):
    """A message with bounds of its own."""

    def problem(self, value: Message, limits: ModelLimits) -> Problem | None:
        return _walk(value, limits)


def chat_bytes(messages: Iterable[Any]) -> int:
    """Returns the total size of the long texts of chat messages."""
    return sum(
        utf8_bytes(message.content)
        + sum(utf8_bytes(part.text) for part in message.content_parts)
        + utf8_bytes(message.reasoning)
        + sum(utf8_bytes(call.arguments_json) for call in message.tool_calls)
        for message in messages
    )


@dataclass(frozen=True, slots=True)
class Messages(Bound):
    """At most ``high`` chat messages, with at most ``max_inner`` calls, as many parts of contents, and ``max_bytes`` of
    text in total."""

    high: int
    max_inner: int
    max_bytes: int

    def problem(self, value: Sequence[Any], limits: ModelLimits) -> Problem | None:
        for name in ("tool_calls", "content_parts") if len(value) <= self.high else ():
            if (number := sum(len(getattr(each, name)) for each in value)) > self.max_inner:
                return Problem(f"at most {self.max_inner:,} {name} in all; they have {number:,}")
        found = Items(self.high, Nested()).problem(value, limits)
        if found is not None:
            return found
        total = chat_bytes(value)
        if total > self.max_bytes:
            return Problem(f"the messages together at most {self.max_bytes:,} bytes; they have {total:,}")
        return None


_PRINTABLE = re.compile(r"[\x20-\x7e]*")
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

SETTINGS = (
    "policy",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_queued_requests",
    "max_queued_tokens",
    "target_itl",
    "default_tenant",
    "tenants",
)
"""The paths of an update mask: the fields of Settings, except its etag."""
_HUNDREDTH = 0.009999999776482582
"""0.01 as a 32-bit float, which the wire has."""
_UINT32 = Number(0, UINT32_MAX)
_FLAG = Bound()
_TENANT = Text(1, 64, TENANT_NAME, "letters, digits, '_', '.' and '-' only")
_TRACE = Text(55, 55, _TRACEPARENT, "W3C trace context, 00-<trace id>-<span id>-<flags> in lower-case hex")
_TRUNCATION = Number(-1, Limit.CONTEXT)
_SIDE = Known(frozenset({0, 1, 2}))
_REQUEST_ID = Text(1, 64, required=True)
_MODEL = ServedModel(1, 256)
_ADAPTER = Text(1, 256)
_CLIENT_ID = Text(1, 128, _PRINTABLE, "printable ASCII")
_MEDIA = Unsupported("is not supported: the model takes only text; send text in its place")

_POOLED: Mapping[str, Bound] = {
    "model": _MODEL,
    "priority": Number(-1000, 1000),
    "tenant": _TENANT,
    "traceparent": _TRACE,
    "client_request_id": _CLIENT_ID,
    "truncate_prompt_tokens": _TRUNCATION,
    "truncation_side": _SIDE,
}
"""Fields of every request to embed, classify or score."""

FIELD_BOUNDS: Mapping[str, Mapping[str, Bound]] = {
    "GenerateOneRequest": {"start": Nested(required=True)},
    "CompleteRequest": {"start": Nested(required=True)},
    "GenerateRequest": {name: Nested() for name in ("start", "cancel", "update", "append", "commit")},
    "GenerationStart": {
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
        "max_draft_tokens": Number(0, MAX_DRAFTS),
        "constraint": Nested(),
        "truncate_prompt_tokens": _TRUNCATION,
        "truncation_side": _SIDE,
        "open": _FLAG,
        "supersedes": _UINT32,
        "idempotency_key": _CLIENT_ID,
        "retain_mode": Known(frozenset({0, 1})),
        "model": _MODEL,
        "prediction": Nested(),
        "ttft_slo_ms": Number(1, MAX_TIMEOUT_MS),
        "tpot_slo_ms": Number(1, 60_000),
        "session_id": _CLIENT_ID,
        "resume_from": Nested(),
    },
    "ResumeFrom": {
        "ticket": Data(MAX_TICKET_BYTES, required=True),
        "choices": Items(64, Nested(), required=True),
    },
    "ReceivedOutput": {
        "token_ids": Ids(MAX_RESUMED_TOKENS),
        **dict.fromkeys(("text_chars", "reasoning_chars", "tool_calls", "argument_chars"), _UINT32),
        "has_ended": _FLAG,
    },
    "Prediction": {"text": Text(0, MAX_TEXT_BYTES), "token_ids": Nested()},
    "Constraint": {
        "json_schema": Text(1, MAX_GRAMMAR_BYTES),
        "any_json": Nested(),
        "regex": Text(0, MAX_REGEX_BYTES),
        **dict.fromkeys(("lark", "gbnf", "structural_tag_json"), Text(1, MAX_GRAMMAR_BYTES)),
        "choices": Nested(),
        "start": Known(frozenset({0, 1, 2})),
    },
    "AnyJson": {},
    "StringChoices": {"values": Texts(1024, MAX_GRAMMAR_BYTES, required=True)},
    "TokenIds": {"ids": Ids(Limit.UNCUT, required=True)},
    "Chat": {
        "messages": Messages(MAX_CHAT_MESSAGES, MAX_INNER_PARTS, MAX_TEXT_BYTES, required=True),
        "add_generation_prompt": _FLAG,
        "tools": Items(128, Nested()),
        "tool_choice": Nested(),
        "parallel_tool_calls": _FLAG,
        "template_variables_json": Text(1, 64 << 10),
        "continue_final_message": _FLAG,
    },
    "ChatMessage": {
        "role": Text(1, 64, required=True),
        "content": Text(0, MAX_TEXT_BYTES),
        "content_parts": Items(128, Nested()),
        "tool_calls": Items(128, Nested()),
        "tool_call_id": Text(1, 256),
        "name": Text(1, 256),
        "reasoning": Text(0, MAX_TEXT_BYTES),
    },
    "ContentPart": {"text": Text(0, MAX_TEXT_BYTES), "image": _MEDIA, "audio": _MEDIA},
    "MediaContent": {"mime_type": Text(1, 128, required=True), "data": Data(MAX_TEXT_BYTES), "uri": Text(1, 8 << 10)},
    "ToolCall": {"id": Text(1, 256), "name": Text(1, 256, required=True), "arguments_json": Text(0, MAX_TEXT_BYTES)},
    "Tool": {"function": Nested(required=True)},
    "FunctionTool": {
        "name": Text(1, 256, required=True),
        "description": Text(0, MAX_TEXT_BYTES),
        "parameters_json": Text(1, MAX_TEXT_BYTES),
        "strict": _FLAG,
    },
    "ToolChoice": {"mode": Known(frozenset({0, 1, 2, 3})), "function": Text(1, 256)},
    "SamplingParams": {
        "temperature": Number(0, 100),
        "top_k": Number(0, 1_000_000),
        "top_p": Number(0, 1),
        "min_p": Number(0, 1),
        "repetition_penalty": Number(_HUNDREDTH, 100),
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), Number(-2, 2)),
        "seed": Number(0, INT64_MAX),
        "max_tokens": Number(1, UINT32_MAX),
        "thinking_token_budget": _UINT32,
        "min_tokens": Number(0, Limit.PROMPT),
        "stop": Items(MAX_STOPS, Text(1, 1024)),
        "stop_token_ids": Ids(MAX_STOP_IDS),
        "ignore_eos": _FLAG,
        "logit_bias": Biases(MAX_BIASES, 100),
        "allowed_token_ids": Ids(65_536),
        "bad_words": Items(256, Text(1, 256)),
        "n": Number(1, MAX_CHOICES),
    },
    "OutputOptions": {
        "format": Known(frozenset({0, 1, 2, 3})),
        "logprobs": Number(0, MAX_TOP_LOGPROBS),
        "prompt_logprobs": Number(0, MAX_TOP_LOGPROBS),
        **dict.fromkeys(("include_special_tokens", "include_token_texts"), _FLAG),
        **dict.fromkeys(("parse_reasoning", "parse_tool_calls"), _FLAG),
    },
    "GenerationCancel": {"refs": Refs(65_536)},
    "GenerationUpdate": {
        "ref": _UINT32,
        "timeout_ms": Number(1, MAX_TIMEOUT_MS),
        "priority": Number(-1000, 1000),
        "max_tokens": Number(1, UINT32_MAX),
    },
    "GenerationAppend": {
        "ref": _UINT32,
        "text": Text(0, MAX_TEXT_BYTES),
        "token_ids": Nested(),
        "chat": Nested(),
        "replace_from": _UINT32,
        "append_id": _UINT32,
    },
    "GenerationCommit": {"ref": _UINT32},
    "PrefetchRequest": {"start": Nested(required=True)},
    "ReleaseRequest": {"request_ids": Items(1000, _REQUEST_ID, required=True), "tenant": _TENANT},
    "EmbedRequest": {
        **_POOLED,
        "inputs": Items(2048, Nested(), required=True),
        "dimensions": Number(1, UINT32_MAX),
        "normalize": _FLAG,
    },
    "EmbedInput": {"text": Text(0, MAX_TEXT_BYTES), "token_ids": NestedIds(Limit.UNCUT)},
    "ClassifyRequest": {
        **_POOLED,
        "inputs": Items(2048, Nested(), required=True),
        "use_activation": _FLAG,
    },
    "ScoreRequest": {
        **_POOLED,
        "queries": Texts(2048, MAX_TEXT_BYTES, required=True),
        "documents": Texts(2048, MAX_TEXT_BYTES, required=True),
        "instruction": Text(0, 64 << 10),
        "use_activation": _FLAG,
    },
    "GetModelRequest": {"model": _MODEL, "tenant": _TENANT},
    "ListModelsRequest": {"page_size": _UINT32, "page_token": Text(1, 64)},
    "TokenizeRequest": {
        "model": _MODEL,
        "text": Text(0, MAX_TEXT_BYTES),
        "add_special_tokens": _FLAG,
        "truncate_prompt_tokens": _TRUNCATION,
        "truncation_side": _SIDE,
        "include_text_offsets": _FLAG,
    },
    "DetokenizeRequest": {
        "model": _MODEL,
        "token_ids": Ids(MAX_DETOKENIZED_IDS),
        "include_special_tokens": _FLAG,
        "include_text_offsets": _FLAG,
    },
    "DescribeTokensRequest": {"model": _MODEL, "token_ids": Ids(MAX_DESCRIBED_IDS)},
    "RenderChatRequest": {"model": _MODEL, "chat": Nested(required=True)},
    "WatchStatsRequest": {"interval": Span(0.1, 3600)},
    "DrainRequest": {},
    "ResumeRequest": {},
    "FlushCacheRequest": {},
    "GetSettingsRequest": {},
    "UpdateSettingsRequest": {
        "settings": Nested(),
        "update_mask": MaskPaths(16, SETTINGS),
        "forget_tenants": Items(1024, _TENANT),
    },
    "Settings": {
        "policy": Known(frozenset({0, 1, 2, 3, 4})),
        "max_num_seqs": Number(1, UINT32_MAX),
        "max_num_batched_tokens": Number(1, UINT32_MAX),
        "max_queued_requests": Number(1, 1 << 20),
        "max_queued_tokens": Number(1, 1 << 32),
        "target_itl": Span(0, 60),
        "default_tenant": Nested(),
        "tenants": Items(1024, Nested()),
        "etag": Text(1, 64),
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
    "ExplainRequest": {"request_id": _REQUEST_ID},
    "ListRequestsRequest": {"filter": Nested(), "page_size": _UINT32, "page_token": Text(1, 64)},
    "CancelRequestsRequest": {"ids": Nested(), "filter": Nested(), "all": Nested()},
    "AllRequests": {},
    "RequestIds": {"request_ids": Items(MAX_LISTED_REQUESTS, _REQUEST_ID, required=True)},
    "RequestFilter": {"tenant": _TENANT, "states": Items(4, Known(frozenset({1, 2, 3, 4}))), "min_age": Span(0)},
    "LoadAdapterRequest": {"name": _ADAPTER, "path": Text(1, 4096)},
    "UnloadAdapterRequest": {"name": _ADAPTER},
    "ListAdaptersRequest": {},
    "WatchKvEventsRequest": {"after_sequence": Number(0, INT64_MAX), "stream_id": Text(1, 64)},
}
"""Bounds by message and field. The default of a field that is not set is always within its bound."""

_REQUIRED: Mapping[str, frozenset[str]] = {
    name: frozenset(field for field, bound in fields.items() if bound.required) for name, fields in FIELD_BOUNDS.items()
}


class Validator:
    """Checks messages against the bounds. Cheap enough for the event loop."""

    def __init__(self, limits: ModelLimits) -> None:
        self.limits = limits

    def check(self, message: Message) -> None:
        """Raises ServiceError with the path of the first field that is out of its bound: MODEL_NOT_FOUND for another
        model's name, CONTEXT_LENGTH if the served model sets the bound, else INVALID_FIELD."""
        found = _walk(message, self.limits)
        if found is not None:
            raise invalid(found.at.removeprefix("."), found.text, found.reason)

    def check_num_ids(self, ids: Sequence[int], field: str, most: Limit) -> None:
        """Checks the length of a list of ids against the model's limit. Raises ServiceError."""
        found = too_many_ids(ids, most, self.limits)
        if found is not None:
            raise invalid(field, found.text, found.reason)

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Checks the ids of a list of any length against the vocabulary. Takes 10 ms for a million. Raises
        ServiceError."""
        found = foreign_id(ids, self.limits.vocab_size)
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
            return found.inside(f".{field}")
        missing.discard(field)
    if missing:
        return Problem("is required", f".{min(missing)}")
    return None

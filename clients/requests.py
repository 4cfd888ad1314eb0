"""Converts keyword arguments, and lines of batch files, to the contract's ``GenerationStart``.

Names, types and ranges of numbers come from the contract's descriptors; the service checks limits that depend on the
model, and its errors name the field too.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from numbers import Integral, Real
from typing import cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

import penstock.v1 as pb
from penstock.clients.chat_messages import CHAT_OPTION_NAMES, ChatMessage, ChatOptions, build_chat, set_chat_option
from penstock.clients.constraints import set_constraint
from penstock.clients.errors import InvalidOption, shown

Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids, or a conversation."""


class Format(Enum):
    """The form of the output."""

    TEXT = "text"
    TOKEN_IDS = "token_ids"
    TEXT_AND_TOKEN_IDS = "text_and_token_ids"


class Options(ChatOptions, total=False):
    """All options of a request except its prompt and timeout, under the contract's names. The contract's comments
    document their meanings, defaults and limits. None means the default. ChatOptions are only for conversations."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Iterable[str] | None
    stop_token_ids: Iterable[int] | None
    ignore_eos: bool | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Iterable[int] | None
    bad_words: str | Iterable[str] | None
    n: int | None
    thinking_token_budget: int | None
    """The maximum number of reasoning tokens; 0: none."""

    format: Format | str | None
    """Default in this client: both text and token ids."""
    logprobs: int | None
    prompt_logprobs: int | None
    include_special_tokens: bool | None
    parse_reasoning: bool | None
    """Whether the model's reasoning is separated from the text."""
    parse_tool_calls: bool | None
    """Whether tool calls are separated from the text. Needs a conversation."""
    include_token_texts: bool | None
    """Whether log-probabilities include the text of each token, as bytes."""

    model: str | None
    """The name of the model. Default: the only one."""
    priority: int | None
    ttft_slo_ms: int | None
    """The target for the time to the first token: requests that would miss it are refused."""
    tpot_slo_ms: int | None
    """The target for the time between two tokens."""
    session_id: str | None
    """The conversation that the request belongs to, which determines how long its KV is retained."""
    tenant: str | None
    continue_from: str | None
    """The id of a request that ended with ``may_continue``: this prompt is appended to its prompt and output."""
    retain_ms: int | None
    retain_mode: str | None
    """``auto``: the KV is retained for about as long as this tenant's requests take to return."""
    constraint: Mapping[str, object] | None
    """What the output must match: one of ``json_schema`` (a schema or its JSON text), ``any_json`` (True), ``regex``,
    ``lark``, ``gbnf``, ``choices`` (texts) and ``structural_tag_json`` (a structural tag or its JSON text)."""
    max_draft_tokens: int | None
    """The maximum number of drafts per step; 0 disables them. Drafts change when tokens arrive, never which."""
    prediction: str | Sequence[int] | None
    """The output that the caller expects, as text or token ids. Drafting from it may save time, and never changes the
    output."""
    traceparent: str | None
    client_request_id: str | None
    idempotency_key: str | None
    """The caller's key: the service refuses a repetition of the request."""
    truncate_prompt_tokens: int | None
    """How many tokens of the prompt to keep; -1: as many as fit the context."""
    truncation_side: str | None
    """The end that is cut: ``left`` keeps the last tokens, ``right`` the first. Default: left."""


# Dictionaries: protobuf's own mappings do not survive a name with half of a surrogate pair.
_SAMPLING = dict(pb.SamplingParams.DESCRIPTOR.fields_by_name)
_OUTPUT = dict(pb.OutputOptions.DESCRIPTOR.fields_by_name)
_START = {
    name: field
    for name, field in pb.GenerationStart.DESCRIPTOR.fields_by_name.items()
    if name
    not in {"ref", "text", "token_ids", "chat", "sampling", "output", "timeout_ms", "open", "supersedes", "resume_from"}
}
_MAX_TIMEOUT_MS = 86_400_000
_PROMPTS_OF_LINE = {
    "prompt": (str, "text"),
    "prompt_token_ids": (list, "a list of token ids"),
    "messages": (list, "a list of messages"),
}

OPTION_NAMES = frozenset({*_SAMPLING, *_OUTPUT, *_START, *CHAT_OPTION_NAMES})
"""The keys of ``Options``, read from the contract."""

MAX_START_BYTES = 5 << 20
"""More than the largest request that a service accepts: 4 MiB of text, and its options."""


def build_start(prompt: Prompt, options: Mapping[str, object], timeout: float | None = None) -> pb.GenerationStart:
    """Builds a ``GenerationStart`` without its ref. ``timeout`` is in seconds. Raises InvalidOption."""
    start = pb.GenerationStart()
    start.output.format = pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
    _set_prompt(start, prompt)
    for name, value in options.items():
        if value is not None:
            _set_option(start, name, value)
    if timeout is not None:
        start.timeout_ms = timeout_ms(timeout)
    if (size := start.ByteSize()) > MAX_START_BYTES:  # a refusal by the transport would end the shared stream
        raise InvalidOption("prompt", f"the request has {size:,} bytes; the limit is {MAX_START_BYTES:,}")
    return start


def start_from_line(line: Mapping[str, object], defaults: Mapping[str, object]) -> pb.GenerationStart:
    """Builds a ``GenerationStart`` from a line of a batch file without its ``id``. ``defaults`` are options for lines
    that do not set them. Raises InvalidOption."""
    options = {**defaults, **line}
    prompts = [name for name in _PROMPTS_OF_LINE if options.get(name) is not None]
    if len(prompts) != 1:
        found = " and ".join(prompts) or "none of them"
        raise InvalidOption("prompt", f"a line has one of prompt, prompt_token_ids and messages; this has {found}")
    [name] = prompts
    prompt = options[name]
    kind, expected = _PROMPTS_OF_LINE[name]
    if not isinstance(prompt, kind) or prompt == []:
        raise InvalidOption(name, f"expected {expected}, got {shown(prompt)}")
    timeout = options.pop("timeout_ms", None)
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int)):
        raise InvalidOption("timeout_ms", f"expected an integer, got {shown(timeout)}")
    if timeout is not None and not 1 <= timeout <= _MAX_TIMEOUT_MS:
        raise InvalidOption("timeout_ms", f"expected 1 to {_MAX_TIMEOUT_MS:,}, got {shown(timeout)}")
    for used in (*_PROMPTS_OF_LINE, "id"):
        options.pop(used, None)
    try:
        return build_start(cast(Prompt, prompt), options, None if timeout is None else timeout / 1000)
    except InvalidOption as error:
        raise InvalidOption(re.sub(r"^prompt\b", name, error.field), error.problem) from None


def build_update(timeout: float | None, priority: int | None, max_tokens: int | None) -> pb.GenerationUpdate:
    """Builds a ``GenerationUpdate`` without its ref; None leaves a value unchanged. Raises InvalidOption."""
    update = pb.GenerationUpdate()
    for name, value in (("priority", priority), ("max_tokens", max_tokens)):
        if value is not None:
            set_field(update, pb.GenerationUpdate.DESCRIPTOR.fields_by_name[name], value)
    if timeout is not None:
        update.timeout_ms = timeout_ms(timeout)
    return update


def build_append(content: Prompt, replace_from: int | None) -> pb.GenerationAppend:
    """Builds a ``GenerationAppend`` without its ref. Raises InvalidOption."""
    append = pb.GenerationAppend()
    _set_prompt(append, content)
    if replace_from is not None:
        set_field(append, pb.GenerationAppend.DESCRIPTOR.fields_by_name["replace_from"], replace_from)
    if (size := append.ByteSize()) > MAX_START_BYTES:  # a refusal by the transport would end the shared stream
        raise InvalidOption("prompt", f"the content has {size:,} bytes; the limit is {MAX_START_BYTES:,}")
    return append


def timeout_ms(seconds: float) -> int:
    """Converts a timeout to milliseconds, at least 1. Raises InvalidOption."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _MAX_TIMEOUT_MS / 1000:
        raise InvalidOption("timeout", f"expected seconds above 0, at most 86,400, got {shown(seconds)}")
    return max(1, round(seconds * 1000))


def _set_prompt(start: pb.GenerationStart | pb.GenerationAppend, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        try:
            start.text = prompt
        except ValueError as error:  # half of a surrogate pair
            raise InvalidOption("prompt", str(error)) from None
        return
    if isinstance(prompt, Mapping | bytes) or not isinstance(prompt, Iterable):
        raise InvalidOption("prompt", f"expected text, token ids or messages, got {shown(prompt)}")
    items = list(prompt)
    if not items:
        raise InvalidOption("prompt", "it is empty")
    if isinstance(items[0], Mapping):
        start.chat.CopyFrom(build_chat(cast(list[ChatMessage], items)))
        return
    try:
        if bool in map(type, items):
            raise TypeError
        start.token_ids.ids.extend(cast(list[int], items))  # protobuf checks faster than a Python loop
    except (TypeError, ValueError):
        wrong = next(i for i, item in enumerate(items) if not _is_token_id(item))
        raise InvalidOption(f"prompt[{wrong}]", f"expected a token id, got {shown(items[wrong])}") from None


def _is_token_id(item: object) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool) and 0 <= int(item) < 2**32


def _set_option(start: pb.GenerationStart, name: str, value: object) -> None:
    if name == "format":
        start.output.format = _format(value)
    elif name in CHAT_OPTION_NAMES:
        if not start.HasField("chat"):
            raise InvalidOption(name, "only a prompt of messages has it")
        set_chat_option(start.chat, name, value)
    elif name in _SAMPLING:
        set_field(start.sampling, _SAMPLING[name], value)
    elif name in _OUTPUT:
        set_field(start.output, _OUTPUT[name], value)
    elif name == "prediction":
        _set_prediction(start.prediction, value)
    elif name == "constraint":
        set_constraint(start.constraint, value)
    elif name in _START:
        set_field(start, _START[name], value)
    else:
        near = difflib.get_close_matches(name, OPTION_NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(sorted(OPTION_NAMES))}"
        raise InvalidOption(name, f"unknown field; {hint}")


def _set_prediction(prediction: pb.Prediction, value: object) -> None:
    content = pb.GenerationAppend()
    try:
        _set_prompt(content, cast(Prompt, value))
        if content.HasField("chat"):
            raise InvalidOption("prompt", "expected text or token ids, got messages")
    except InvalidOption as error:
        raise InvalidOption(error.field.replace("prompt", "prediction", 1), error.problem) from None
    if content.WhichOneof("content") == "text":
        prediction.text = content.text
    else:
        prediction.token_ids.CopyFrom(content.token_ids)


def _format(value: object) -> pb.OutputFormat.ValueType:
    try:
        return pb.OutputFormat.Value(f"OUTPUT_FORMAT_{Format(value).name}")
    except ValueError:
        known = ", ".join(each.value for each in Format)
        raise InvalidOption("format", f"expected one of {known}, got {shown(value)}") from None


def set_field(message: Message, field: FieldDescriptor, value: object) -> None:
    """Sets a field from a value of Python or JSON. Failed checks of protobuf are reported under the field's name."""
    try:
        if field.message_type is not None:  # the only fields here that are not scalars are maps
            _set_map(getattr(message, field.name), field.name, field.message_type.fields_by_name["value"], value)
        elif field.is_repeated:
            items = [value] if isinstance(value, str) else value
            if isinstance(items, Mapping) or not isinstance(items, Iterable):
                raise InvalidOption(field.name, f"expected a list, got {shown(value)}")
            getattr(message, field.name).extend([_scalar(field, field.name, item) for item in items])
        elif field.enum_type is not None:
            setattr(message, field.name, _enum_number(field, value))
        else:
            setattr(message, field.name, _scalar(field, field.name, value))
    except InvalidOption:
        raise
    except (TypeError, ValueError, OverflowError) as error:  # OverflowError: an integer too large for a float
        raise InvalidOption(field.name, str(error)) from None


def _enum_number(field: FieldDescriptor, value: object) -> int:
    """Returns an enum's value by its lower-case name without the prefix: ``left`` for TRUNCATION_SIDE_LEFT."""
    assert field.enum_type is not None
    _, *values = field.enum_type.values  # the first one stands for none of them
    numbers = {each.name.removeprefix(f"{field.name.upper()}_").lower(): each.number for each in values}
    if not isinstance(value, str) or value not in numbers:
        raise InvalidOption(field.name, f"expected {' or '.join(numbers)}, got {shown(value)}")
    return numbers[value]


def _set_map(target: dict[int, object], name: str, of_value: FieldDescriptor, value: object) -> None:
    """Sets a map of token ids to numbers. In JSON, keys are text."""
    if not isinstance(value, Mapping):
        raise InvalidOption(name, f"expected a map of token ids to numbers, got {shown(value)}")
    for key, item in value.items():
        try:
            token_id = int(key)
        except (TypeError, ValueError):
            token_id = -1
        if not _is_token_id(token_id):
            raise InvalidOption(name, f"expected token ids as keys, got {shown(key)}")
        target[token_id] = _scalar(of_value, name, item)


_RANGES: dict[int, range] = {
    FieldDescriptor.CPPTYPE_INT32: range(-(2**31), 2**31),
    FieldDescriptor.CPPTYPE_UINT32: range(2**32),
    FieldDescriptor.CPPTYPE_INT64: range(2**63),
}
_TYPES: dict[int, tuple[type, str]] = {
    FieldDescriptor.CPPTYPE_BOOL: (bool, "true or false"),
    FieldDescriptor.CPPTYPE_FLOAT: (Real, "a number"),
    FieldDescriptor.CPPTYPE_INT32: (Integral, "an integer"),
    FieldDescriptor.CPPTYPE_STRING: (str, "text"),
    FieldDescriptor.CPPTYPE_UINT32: (Integral, "an integer"),
    FieldDescriptor.CPPTYPE_INT64: (Integral, "an integer"),
}


def _scalar(field: FieldDescriptor, name: str, value: object) -> object:
    """Returns the value if its type is the field's: protobuf would accept True and 1.0 for 1."""
    kind, expected = _TYPES[field.cpp_type]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidOption(name, f"expected {expected}, got {shown(value)}")
    allowed = _RANGES.get(field.cpp_type)
    if allowed is not None and isinstance(value, Integral) and int(value) not in allowed:
        low, high = allowed[0], allowed[-1]
        raise InvalidOption(name, f"expected {low:,} to {high:,}, got {shown(value)}")
    return value

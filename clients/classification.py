"""Converts texts to the contract's ``ClassifyRequest`` and ``ScoreRequest``, and the responses to values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import penstock.v1 as pb
from penstock.clients.embeddings import Input, add_inputs, usage_of
from penstock.clients.errors import InvalidOption, shown
from penstock.clients.events import Usage
from penstock.clients.requests import MAX_START_BYTES, set_field


class ClassifyOptions(TypedDict, total=False):
    """All options of a request except its inputs and timeout, under the contract's names. The contract's comments
    document their meanings, defaults and limits. None means the default."""

    model: str | None
    use_activation: bool | None
    """False: values are logits."""
    priority: int | None
    tenant: str | None
    traceparent: str | None
    client_request_id: str | None
    truncate_prompt_tokens: int | None
    """How many tokens of each input to keep; -1: as many as fit the context."""
    truncation_side: str | None
    """The end that is cut: ``left`` keeps the last tokens, ``right`` the first. Default: right."""


class ScoreOptions(ClassifyOptions, total=False):
    """The options of a request to score pairs of a query and a document."""

    instruction: str | None
    """An instruction to the model. Only with a chat template for pairs, which shows it as the role ``system``."""


@dataclass(slots=True)
class Classes:
    """The response to one request to classify inputs."""

    labels: list[str]
    """The model's labels."""
    values: list[list[float]]
    """For each input, in their order: a value for each label."""
    usage: Usage
    request_id: str

    @classmethod
    def from_proto(cls, message: pb.ClassifyResponse) -> "Classes":
        values = [list(each.values) for each in message.classifications]
        return cls(list(message.labels), values, usage_of(message.usage), message.request_id)


@dataclass(slots=True)
class Scores:
    """The response to one request to score documents."""

    scores: list[float]
    """One for each document, in their order. Higher is more relevant."""
    usage: Usage
    request_id: str

    @classmethod
    def from_proto(cls, message: pb.ScoreResponse) -> "Scores":
        return cls(list(message.scores), usage_of(message.usage), message.request_id)


def build_classify_request(inputs: str | Sequence[Input], options: Mapping[str, object]) -> pb.ClassifyRequest:
    """Builds a ``ClassifyRequest``. Raises InvalidOption."""
    request = pb.ClassifyRequest()
    add_inputs(request, inputs)
    _set_options(request, options, ("inputs",))
    return request


def build_score_request(
    query: str | Sequence[str], documents: Sequence[str], options: Mapping[str, object]
) -> pb.ScoreRequest:
    """Builds a ``ScoreRequest``. Raises InvalidOption."""
    request = pb.ScoreRequest()
    if isinstance(documents, str):
        raise InvalidOption("documents", f"expected a list of texts, got {shown(documents)}")
    fields = request.DESCRIPTOR.fields_by_name
    for name, texts in (("queries", query), ("documents", documents)):
        set_field(request, fields[name], texts)
    _set_options(request, options, ("queries", "documents"))
    return request


def _set_options(
    request: pb.ClassifyRequest | pb.ScoreRequest, options: Mapping[str, object], inputs: Sequence[str]
) -> None:
    """Sets the options, and checks the size of the whole request. ``inputs`` names the fields that are not options."""
    fields = {name: field for name, field in request.DESCRIPTOR.fields_by_name.items() if name not in inputs}
    for name, value in options.items():
        if name not in fields:
            raise InvalidOption(name, f"unknown field; the fields are {', '.join(sorted(fields))}")
        if value is not None:
            set_field(request, fields[name], value)
    if (size := request.ByteSize()) > MAX_START_BYTES:
        raise InvalidOption(inputs[-1], f"the request has {size:,} bytes; the limit is {MAX_START_BYTES:,}")

"""Converts inputs to the contract's ``EmbedRequest``, and its response to vectors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, cast

import penstock.v1 as pb
from penstock.clients.errors import InvalidOption, shown
from penstock.clients.events import Usage
from penstock.clients.requests import MAX_START_BYTES, set_field
from penstock.v1 import ClassifyRequest

if TYPE_CHECKING:
    from penstock.v1.embedding_pb2_grpc import EmbeddingServiceAsyncStub

Input = str | Sequence[int]
"""Text, or token ids."""


class EmbedOptions(TypedDict, total=False):
    """All options of a request except its inputs and timeout, under the contract's names. The contract's comments
    document their meanings, defaults and limits. None means the default."""

    model: str | None
    dimensions: int | None
    normalize: bool | None
    priority: int | None
    tenant: str | None
    traceparent: str | None
    client_request_id: str | None
    truncate_prompt_tokens: int | None
    """How many tokens of each input to keep; -1: as many as fit the context."""
    truncation_side: str | None
    """The end that is cut: ``left`` keeps the last tokens, ``right`` the first. Default: right."""


_OPTIONS = {name: field for name, field in pb.EmbedRequest.DESCRIPTOR.fields_by_name.items() if name != "inputs"}


@dataclass(slots=True)
class Embeddings:
    """The response to one request."""

    vectors: list[list[float]]
    """One for each input, in their order."""
    usage: Usage
    request_id: str

    @classmethod
    def from_proto(cls, message: pb.EmbedResponse) -> "Embeddings":
        vectors = [list(embedding.values) for embedding in message.embeddings]
        return cls(vectors, usage_of(message.usage), message.request_id)


def usage_of(usage: pb.Usage) -> Usage:
    """Returns the usage in a response."""
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)


async def embed_at_once(
    stub: "EmbeddingServiceAsyncStub", request: pb.EmbedRequest, **options: Any
) -> pb.EmbedResponse:
    """Returns all messages of one call as one. ``options`` are those of a call."""
    whole = pb.EmbedResponse()
    async for message in stub.Embed(request, **options):
        whole.MergeFrom(message)
    whole.first_index = 0
    return whole


def build_embed_request(inputs: str | Sequence[Input], options: Mapping[str, object]) -> pb.EmbedRequest:
    """Builds an ``EmbedRequest``. Raises InvalidOption."""
    request = pb.EmbedRequest()
    add_inputs(request, inputs)
    for name, value in options.items():
        if name not in _OPTIONS:
            raise InvalidOption(name, f"unknown field; the fields are {', '.join(sorted(_OPTIONS))}")
        if value is not None:
            set_field(request, _OPTIONS[name], value)
    if (size := request.ByteSize()) > MAX_START_BYTES:
        raise InvalidOption("inputs", f"the request has {size:,} bytes; the limit is {MAX_START_BYTES:,}")
    return request


def add_inputs(request: pb.EmbedRequest | ClassifyRequest, inputs: str | Sequence[Input]) -> None:
    """Adds the inputs to those of a request. Raises InvalidOption."""
    if isinstance(inputs, Mapping | bytes) or not isinstance(inputs, Iterable):
        raise InvalidOption("inputs", f"expected a text or a list of inputs, got {shown(inputs)}")
    for index, item in enumerate([inputs] if isinstance(inputs, str) else inputs):
        _fill_input(request.inputs.add(), f"inputs[{index}]", item)


def _fill_input(added: pb.EmbedInput, where: str, item: object) -> None:
    try:
        if isinstance(item, str):
            added.text = item
            return
        if isinstance(item, Mapping | bytes) or not isinstance(item, Iterable):
            raise InvalidOption(where, f"expected text or a list of token ids, got {shown(item)}")
        ids = list(item)
        if bool in map(type, ids):
            raise TypeError("expected token ids, got a bool")
        added.token_ids.SetInParent()
        added.token_ids.ids.extend(cast(list[int], ids))
    except (TypeError, ValueError) as error:  # half of a surrogate pair, or not a token id
        raise InvalidOption(where, str(error)) from None

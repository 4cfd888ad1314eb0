"""vLLM's ``truncate_prompt_tokens`` and ``truncation_side``: fills the service's fields, and truncates a prompt's
tokens for answers that contain them."""

from collections.abc import Sequence
from typing import Protocol

from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.v1 import embedding_pb2, generation_pb2 as pb, tokenizer_pb2

_SIDES = {"left": pb.TRUNCATION_SIDE_LEFT, "right": pb.TRUNCATION_SIDE_RIGHT}


class TruncatingBody(Protocol):
    """A body with the two fields."""

    @property
    def truncate_prompt_tokens(self) -> int | None:
        """How many tokens to keep; -1: as many as fit."""
        ...

    @property
    def truncation_side(self) -> str | None:
        """The side that is cut: ``left`` or ``right``."""
        ...


def fill_truncation(
    request: pb.Start | embedding_pb2.EmbedRequest | tokenizer_pb2.TokenizeRequest, body: TruncatingBody
) -> None:
    """Copies the fields; the service checks their limits."""
    if body.truncate_prompt_tokens is None:
        return
    request.truncate_prompt_tokens = body.truncate_prompt_tokens
    if body.truncation_side is not None:
        request.truncation_side = _SIDES[body.truncation_side]


def fill_prompt_truncation(
    request: tokenizer_pb2.TokenizeRequest, body: TruncatingBody, caller: UpstreamCaller
) -> None:
    """Fills the fields for the prompt of a generation, which leaves room for a token of output."""
    fill_truncation(request, body)
    if request.truncate_prompt_tokens in (-1, caller.model.max_model_len):
        request.truncate_prompt_tokens = caller.model.max_model_len - 1


def truncated(token_ids: Sequence[int], body: TruncatingBody, caller: UpstreamCaller) -> Sequence[int]:
    """Returns the tokens of a prompt that the service keeps."""
    if not body.truncate_prompt_tokens:
        return token_ids
    most = caller.model.max_model_len - 1
    kept = most if body.truncate_prompt_tokens < 0 else min(body.truncate_prompt_tokens, most)
    return token_ids[:kept] if body.truncation_side == "right" else token_ids[-kept:]

"""vLLM's ``truncate_prompt_tokens`` and ``truncation_side``: fills the service's fields, and truncates a prompt's
tokens for answers that contain them."""

from collections.abc import Sequence

import penstock.v1 as pb
from penstock.clients.gateway.schemas.classification import PooledBody
from penstock.clients.gateway.schemas.common import GenerationBody
from penstock.clients.gateway.schemas.embeddings import EmbeddingsRequest
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.v1 import ClassifyRequest, EmbedRequest, ScoreRequest, TokenizeRequest

_SIDES = {"left": pb.TRUNCATION_SIDE_LEFT, "right": pb.TRUNCATION_SIDE_RIGHT}


def fill_truncation(
    request: pb.GenerationStart | ClassifyRequest | EmbedRequest | ScoreRequest | TokenizeRequest,
    body: GenerationBody | EmbeddingsRequest | PooledBody,
) -> None:
    """Copies the fields; the service checks their limits."""
    if body.truncate_prompt_tokens is None:
        return
    request.truncate_prompt_tokens = body.truncate_prompt_tokens
    if body.truncation_side is not None:
        request.truncation_side = _SIDES[body.truncation_side]


def fill_prompt_truncation(request: TokenizeRequest, body: GenerationBody, caller: UpstreamCaller) -> None:
    """Fills the fields for the prompt of a generation, which leaves room for a token of output."""
    fill_truncation(request, body)
    if request.truncate_prompt_tokens in (-1, caller.model.max_model_len):
        request.truncate_prompt_tokens = caller.model.max_model_len - 1


def truncated(token_ids: Sequence[int], body: GenerationBody, caller: UpstreamCaller) -> Sequence[int]:
    """Returns the tokens of a prompt that the service keeps."""
    if not body.truncate_prompt_tokens:
        return token_ids
    most = caller.model.max_model_len - 1
    kept = most if body.truncate_prompt_tokens < 0 else min(body.truncate_prompt_tokens, most)
    return token_ids[:kept] if body.truncation_side == "right" else token_ids[-kept:]

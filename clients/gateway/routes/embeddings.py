"""POST /v1/embeddings, over ``EmbeddingService.Embed``."""

import asyncio
import base64
import struct
import time
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import TypeVar, cast

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

import penstock.v1 as pb
from penstock.clients.gateway.errors import GatewayError, renaming
from penstock.clients.gateway.field_names import Names, caller_name
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.requests.sampling import check_model, client_request_id
from penstock.clients.gateway.requests.truncation import fill_truncation
from penstock.clients.gateway.responses.chunking import encoded
from penstock.clients.gateway.responses.http_response import until_gone
from penstock.clients.gateway.routes.caller_route import ERRORS, CallerDep, CallerRoute
from penstock.clients.gateway.schemas.common import Prompts, is_single
from penstock.clients.gateway.schemas.embeddings import EmbeddingResponse, EmbeddingsRequest
from penstock.clients.gateway.tracing import traceparent
from penstock.clients.gateway.traffic import GONE
from penstock.v1 import TokenIds

T = TypeVar("T")
_VECTORS_AT_ONCE = 16
"""How many vectors are encoded before other tasks run: one or two milliseconds of work."""


def make_router() -> APIRouter:
    """Makes the route."""
    router = APIRouter(route_class=CallerRoute, tags=["embeddings"], responses=ERRORS)

    @router.post("/v1/embeddings", response_model=EmbeddingResponse)
    async def embed(body: EmbeddingsRequest, caller: CallerDep, request: Request) -> Response:
        """Returns a vector for each text."""
        check_model(body.model, caller)
        message = embed_request(body, request.headers, caller.tenant)
        names = (*input_names(body.input), ("client_request_id", "request_id"))
        with renaming(partial(caller_name, names=names)):
            embed = caller.call(caller.stubs.embedding.Embed, message, is_short=False)
            response = await while_connected(request, embed)
        answer = await answer_of(response, caller.model.name, body.encoding_format == "base64")
        headers = {"x-request-id": response.request_id}
        return Response(await encoded(answer), headers=headers, media_type="application/json")

    return router


def embed_request(body: EmbeddingsRequest, headers: Mapping[str, str], tenant: str) -> pb.EmbedRequest:
    """Converts a request to the contract's form."""
    request = pb.EmbedRequest(
        inputs=contract_inputs(body.input),
        dimensions=body.dimensions,
        normalize=body.normalize,
        priority=body.priority,
        tenant=tenant,
        traceparent=traceparent(),
        client_request_id=client_request_id(body.request_id, headers.get("x-request-id")),
    )
    fill_truncation(request, body)
    return request


def contract_inputs(given: Prompts) -> list[pb.EmbedInput]:
    """Converts texts or tokens to the contract's form."""
    return [
        pb.EmbedInput(text=each) if isinstance(each, str) else pb.EmbedInput(token_ids=TokenIds(ids=each))
        for each in cast(Sequence[str | Sequence[int]], [given] if is_single(given) else given)
    ]


def input_names(given: Prompts) -> Names:
    """Returns the caller's names for the contract's inputs: ``input[3][5]`` for an id, ``input[5]`` if the caller's
    input is one list of ids."""
    return ((r"inputs(\[\d+\])(\.[a-z_.]+)?", "input" if is_single(given) else r"input\1"), ("inputs", "input"))


async def answer_of(response: pb.EmbedResponse, model: str, in_base64: bool) -> Json:
    """Converts a response to OpenAI's form; other tasks run in between."""
    data: list[Json] = []
    for index, embedding in enumerate(response.embeddings):
        if index and index % _VECTORS_AT_ONCE == 0:
            await asyncio.sleep(0)
        # Encoded here as JSON too: a few long vectors would take too long to encode together.
        values = as_base64(embedding.values) if in_base64 else msgspec.Raw(msgspec.json.encode(list(embedding.values)))
        data.append({"object": "embedding", "index": index, "embedding": values})
    num_tokens = response.usage.prompt_tokens
    return {
        "object": "list",
        "id": f"embd-{response.request_id}",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def as_base64(values: Sequence[float]) -> str:
    """Encodes 32-bit floats, little-endian, as OpenAI's clients expect."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of ``work``, which is cancelled if the caller disconnects."""
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(until_gone(request.receive), name="penstock-gateway-watch")
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise GatewayError(GONE, "the caller disconnected")
        return working.result()
    finally:
        working.cancel()
        watching.cancel()

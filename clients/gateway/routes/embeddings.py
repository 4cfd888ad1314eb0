"""POST /v1/embeddings, over ``EmbeddingService.Embed``."""

import asyncio
import base64
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar, cast

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import penstock.v1 as pb
from penstock.clients.errors import RequestFailed
from penstock.clients.gateway.errors import GatewayError, ResponseCut, renaming
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
from penstock.clients.gateway.upstream.caller_headers import fill_routing
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
        fill_routing(message, request.headers, caller.settings)
        names = (*input_names(body.input), ("client_request_id", "request_id"))
        messages = caller.stream(caller.stubs.embedding.Embed, message)
        with renaming(partial(caller_name, names=names)):
            first = await while_connected(request, anext(messages))
        in_base64 = body.encoding_format == "base64"
        if not first.HasField("usage"):
            return _StreamedEmbeddings(first, messages, caller.model_name, in_base64)
        answer = await answer_of(first, caller.model_name, in_base64)
        headers = {"x-request-id": first.request_id}
        return Response(await encoded(answer), headers=headers, media_type="application/json")

    return router


class _StreamedEmbeddings(Response):
    """A response that is too large to be kept: its vectors are passed on as they arrive. If the service fails in
    between, the connection is closed, since the status line is gone."""

    def __init__(
        self, first: pb.EmbedResponse, later: AsyncGenerator[pb.EmbedResponse, None], model: str, in_base64: bool
    ) -> None:
        super().__init__(media_type="application/json", headers={"x-request-id": first.request_id})
        del self.headers["content-length"]
        self._first = first
        self._later = later
        self._model = model
        self._in_base64 = in_base64

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, message = Request(scope, receive), self._first
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        begin = msgspec.json.encode(_head(message, self._model))[:-1] + b',"data":['
        async with aclosing(self._later):
            while True:
                items = b",".join(await items_of(message, self._in_base64))
                if message.HasField("usage"):
                    break
                await send({"type": "http.response.body", "body": begin + items, "more_body": True})
                begin = b","
                try:
                    message = await while_connected(request, anext(self._later))
                except (GatewayError, RequestFailed):
                    raise ResponseCut from None
        end = b'],"usage":%b}' % msgspec.json.encode(_usage(message))
        await send({"type": "http.response.body", "body": begin + items + end, "more_body": False})


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
    """Converts a whole response to OpenAI's form; other tasks run in between."""
    data = [msgspec.Raw(item) for item in await items_of(response, in_base64)]
    return _head(response, model) | {"data": data, "usage": _usage(response)}


async def items_of(message: pb.EmbedResponse, in_base64: bool) -> list[bytes]:
    """Converts the vectors of a message to OpenAI's form, as JSON; other tasks run in between. A few long vectors would
    take too long to encode together."""
    items: list[bytes] = []
    for index, embedding in enumerate(message.embeddings):
        if index and index % _VECTORS_AT_ONCE == 0:
            await asyncio.sleep(0)
        values = as_base64(embedding.values) if in_base64 else list(embedding.values)
        item = {"object": "embedding", "index": message.first_index + index, "embedding": values}
        items.append(msgspec.json.encode(item))
    return items


def _head(first: pb.EmbedResponse, model: str) -> Json:
    return {"object": "list", "id": f"embd-{first.request_id}", "created": int(time.time()), "model": model}


def _usage(last: pb.EmbedResponse) -> Json:
    num_tokens = last.usage.prompt_tokens
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


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

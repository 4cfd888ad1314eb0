"""POST /v1/classify, /v1/score and /v1/rerank, over ``ClassificationService``."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

import penstock.v1 as pb
from penstock.clients.gateway.errors import invalid, renaming
from penstock.clients.gateway.field_names import Names, caller_name
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.requests.sampling import check_model, client_request_id
from penstock.clients.gateway.requests.truncation import fill_truncation
from penstock.clients.gateway.responses.chunking import encoded
from penstock.clients.gateway.routes.caller_route import ERRORS, CallerDep, CallerRoute
from penstock.clients.gateway.routes.embeddings import contract_inputs, input_names, while_connected
from penstock.clients.gateway.schemas.classification import (
    ClassifyAnswer,
    ClassifyRequest,
    DocumentText,
    PairsBody,
    PooledBody,
    RerankAnswer,
    RerankRequest,
    ScoreAnswer,
    ScoreRequest,
)
from penstock.clients.gateway.tracing import traceparent
from penstock.clients.gateway.upstream.caller_headers import fill_routing
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.v1 import Usage

_VALUES_AT_ONCE = 8192
"""How many values are encoded before other tasks run: one or two milliseconds of work."""
_VALUES_PER_RESULT = 32
"""How many values cost as much as the rest of a result."""
_OWN_NAMES: Names = (("client_request_id", "request_id"),)


def make_router() -> APIRouter:
    """Makes the routes."""
    router = APIRouter(route_class=CallerRoute, tags=["classification"], responses=ERRORS)

    @router.post("/v1/classify", response_model=ClassifyAnswer)
    async def classify(body: ClassifyRequest, caller: CallerDep, request: Request) -> Response:
        """Returns the probabilities of the model's labels for each text."""
        message = pb.ClassifyRequest(inputs=contract_inputs(body.input))
        names = (*input_names(body.input), *_OWN_NAMES)
        response = await _call(caller.stubs.classification.Classify, message, body, names, caller, request)
        return await _answer(await _classes(response, caller.model_name), response.request_id)

    @router.post("/v1/score", response_model=ScoreAnswer)
    async def score(body: ScoreRequest, caller: CallerDep, request: Request) -> Response:
        """Returns how well the texts of each pair match."""
        (query_name, queries), (document_name, documents) = _sides(body)
        message = _pairs(_list(queries), _list(documents), body)
        names = (_side_names("queries", query_name, queries), _side_names("documents", document_name, documents))
        response = await _call(caller.stubs.classification.Score, message, body, names, caller, request)
        answer = _common("score", response.request_id, response.usage, caller.model_name)
        answer["data"] = [{"index": i, "object": "score", "score": each} for i, each in enumerate(response.scores)]
        return await _answer(answer, response.request_id)

    @router.post("/v1/rerank", response_model=RerankAnswer)
    async def rerank(body: RerankRequest, caller: CallerDep, request: Request) -> Response:
        """Returns the documents that are the most relevant to a query, with their scores."""
        documents = [each.text if isinstance(each, DocumentText) else each for each in body.documents]
        names: Names = ((r"queries(\[0\])?", "query"),)
        response = await _call(
            caller.stubs.classification.Score, _pairs([body.query], documents, body), body, names, caller, request
        )
        scores = response.scores
        best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n or len(scores)]
        results: list[Json] = []
        for index in best:
            results.append({"index": index, "relevance_score": scores[index]})
            if body.return_documents is not False:
                results[-1]["document"] = {"text": documents[index]}
        answer = {
            "id": f"rerank-{response.request_id}",
            "model": caller.model_name,
            "results": results,
            "usage": _usage(response.usage),
        }
        return await _answer(answer, response.request_id)

    return router


async def _call(
    method: Callable[..., Any],
    message: pb.ClassifyRequest | pb.ScoreRequest,
    body: PooledBody,
    names: Names,
    caller: UpstreamCaller,
    request: Request,
) -> Any:
    """Fills the fields that all requests have, and returns the service's response. Raises GatewayError."""
    check_model(body.model, caller)
    if body.activates is not None:
        message.use_activation = body.activates
    if body.priority is not None:
        message.priority = body.priority
    message.tenant = caller.tenant
    message.traceparent = traceparent()
    message.client_request_id = client_request_id(body.request_id, request.headers.get("x-request-id"))
    fill_truncation(message, body)
    fill_routing(message, request.headers, caller.settings)
    with renaming(partial(caller_name, names=(*names, *_OWN_NAMES))):
        return await while_connected(request, caller.call(method, message, is_short=False))


def _pairs(queries: Sequence[str], documents: Sequence[str], body: PairsBody) -> pb.ScoreRequest:
    return pb.ScoreRequest(queries=queries, documents=documents, instruction=body.instruction)


def _sides(body: ScoreRequest) -> Sequence[tuple[str, str | list[str]]]:
    """Returns the queries and the documents, each with the name of its field. Raises GatewayError."""
    sides = []
    for first, second in (("text_1", "queries"), ("text_2", "documents")):
        given = [(name, value) for name in (first, second) if (value := getattr(body, name)) is not None]
        if len(given) != 1:
            problem = "is required" if not given else f"means the same as {second}; send one of them"
            raise invalid(first, problem)
        sides += given
    return sides


def _list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _side_names(contract: str, name: str, texts: str | list[str]) -> tuple[str, str]:
    """Returns the caller's name for the contract's field."""
    return (rf"{contract}(\[0\])?", name) if isinstance(texts, str) else (contract, name)


async def _classes(response: pb.ClassifyResponse, model: str) -> Json:
    """Converts the response to vLLM's form; other tasks run in between."""
    data: list[Json] = []
    at_once = max(1, _VALUES_AT_ONCE // (len(response.labels) + _VALUES_PER_RESULT))
    for index, each in enumerate(response.classifications):
        if index and index % at_once == 0:
            await asyncio.sleep(0)
        values = list(each.values)
        label = response.labels[values.index(max(values))]
        # Encoded here as JSON too: a few long lists would take too long to encode together.
        probs = msgspec.Raw(msgspec.json.encode(values))
        data.append({"index": index, "label": label, "probs": probs, "num_classes": len(values)})
    return _common("classify", response.request_id, response.usage, model) | {"data": data}


def _common(kind: str, request_id: str, usage: Usage, model: str) -> Json:
    return {
        "id": f"{kind}-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [],
        "usage": _usage(usage),
    }


def _usage(usage: Usage) -> Json:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}


async def _answer(answer: Json, request_id: str) -> Response:
    return Response(await encoded(answer), headers={"x-request-id": request_id}, media_type="application/json")

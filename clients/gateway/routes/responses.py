"""POST /v1/responses: answers conversations in the format of OpenAI's newer API, by the same path as chat completions.

Nothing is stored, so the paths of stored responses return an error.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.clients.events import Finished, Usage
from penstock.clients.gateway.errors import GatewayError
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.requests.chat import build_chat_start, check_chat, rendered_ids
from penstock.clients.gateway.requests.response_tools import ResponseTools
from penstock.clients.gateway.requests.responses import as_chat, format_name
from penstock.clients.gateway.requests.sampling import check_model
from penstock.clients.gateway.responses.chat_stream import ChatReader
from penstock.clients.gateway.responses.http_response import StreamingOrWholeResponse
from penstock.clients.gateway.responses.response_events import ResponseEvents
from penstock.clients.gateway.routes.caller_route import ERRORS, GENERATION_ERRORS, CallerDep, CallerRoute
from penstock.clients.gateway.schemas.responses import InputTokens, ResponsesRequest
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.clients.gateway.upstream.upstream_request import Arrival
from penstock.v1 import Model

_log = logging.getLogger(__name__)
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's names for failures in a response, by HTTP code; all others are server_error."""


def make_router() -> APIRouter:
    """Makes the routes."""
    reported = set[str]()
    router = APIRouter(route_class=CallerRoute, tags=["generation"])

    @router.post(
        "/v1/responses",
        response_model=dict[str, Any],
        responses=GENERATION_ERRORS,
        summary="Answer a conversation, with OpenAI's newer API",
        description="The stateless part of OpenAI's Responses API: nothing is stored, so each request has its whole "
        "input. With `stream`, the answer is a series of OpenAI's typed events; the last one has the whole answer.",
    )
    async def respond(body: ResponsesRequest, request: Request, caller: CallerDep) -> Response:
        converted = as_chat(body)
        for kind in {each.partition("_20")[0] for each in converted.tools.hosted} - reported:
            reported.add(kind)  # most clients that send a hosted tool send it in every request
            _log.warning("tools of type %s are not offered to the model: this service runs no hosted tools", kind)
        chat, names = converted.chat, converted.names
        check_chat(chat, caller)
        try:
            start = build_chat_start(chat, request.headers, caller)
        except GatewayError as error:
            raise error.with_param(format_name) from None
        return StreamingOrWholeResponse(
            caller,
            [start],
            ResponseWriter(body, caller, ChatReader(chat, caller), converted.tools),
            stream=bool(body.stream),
            caller_name=lambda _, field: names.caller_name(field),
            last=b"",
        )

    @router.post(
        "/v1/responses/input_tokens",
        responses=ERRORS,
        summary="Count the input tokens of a response",
        description="Counts the tokens in the prompt of a request to /v1/responses, without answering it.",
    )
    async def count(body: ResponsesRequest, caller: CallerDep) -> InputTokens:
        converted = as_chat(body)
        check_model(body.model, caller)
        token_ids = await rendered_ids(converted.chat, caller, converted.names.caller_name)
        return InputTokens(input_tokens=len(token_ids))

    stored = APIRouter(include_in_schema=False)

    @stored.get("/v1/responses/{response_id}")
    @stored.delete("/v1/responses/{response_id}")
    @stored.get("/v1/responses/{response_id}/input_items")
    @stored.post("/v1/responses/{response_id}/cancel")
    async def not_found(response_id: str) -> Response:
        problem = "nothing is stored here; keep the responses that you get"
        raise GatewayError(404, f"response_id: {problem}", param="response_id", code="response_not_found")

    router.include_router(stored)
    return router


class WholeResponse:
    """Returns the response of the last event."""

    def __init__(self) -> None:
        self._response: Json = {}

    def add_chunk(self, chunk: Json) -> None:
        self._response = chunk.get("response", self._response)

    def result(self) -> Json:
        return self._response


class ResponseWriter:
    """Writes the events of a response."""

    whole = WholeResponse

    def __init__(
        self, body: ResponsesRequest, caller: UpstreamCaller, reader: ChatReader, tools: ResponseTools
    ) -> None:
        self._settled = _settled(body, caller.model)
        self.num_kept_bytes = len(msgspec.json.encode(self._settled))
        self._reader = reader
        self._tools = replace(tools, functions=[], places=[], choice=None)  # the others identify the called tools
        self._events: ResponseEvents
        self._usage = Usage()
        self._is_cut = False

    def begin_response(self, request_id: str) -> list[Json]:
        self._events = ResponseEvents({"id": f"resp_{request_id}"} | self._settled, self._tools.named)
        return self._events.begin_response()

    async def add_arrivals(self, arrivals: Sequence[Arrival]) -> list[Json]:
        for _, event in arrivals:
            if isinstance(event, Finished):
                self._usage = event.usage
        events: list[Json] = []
        for part in await self._reader.read(arrivals):
            self._is_cut = part.finish_reason == "length"
            events += self._events.add_part(part)
        return events

    def end(self) -> list[Json]:
        """Returns the last events, with the whole response."""
        return self._events.end(self._usage_json(), is_cut=self._is_cut)

    def failed(self, error: GatewayError) -> list[Json]:
        """Returns the last events of a failed response, with the output so far and the error."""
        return self._events.fail(_CODES.get(error.status, "server_error"), error.message)

    def _usage_json(self) -> Json:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        }


def _settled(body: ResponsesRequest, model: Model) -> Json:
    """Returns the fields of a response that the request determines; most are copies of the request's."""
    given = body.model_dump(exclude_none=True, by_alias=True, include=_RETURNED)
    return {
        "object": "response",
        "created_at": int(time.time()),
        "model": model.name,
        "background": False,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": _default(model, "temperature"),
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": _default(model, "top_p"),
        "truncation": "disabled",
        "user": None,
        **given,
        "text": {"format": {"type": "text"}, "verbosity": "medium"} | given.get("text", {}),
    }


def _default(model: Model, name: Literal["temperature", "top_p"]) -> float:
    """Returns the default of a sampling field: the model's, in the digits of its file, else 1."""
    defaults = model.sampling_defaults
    return float(f"{getattr(defaults, name):.6g}") if defaults.HasField(name) else 1.0


_RETURNED = {
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "user",
}

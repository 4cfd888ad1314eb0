"""POST /v1/responses: answers conversations in the format of OpenAI's newer API, by the same path as chat
completions."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.clients.errors import RequestFailed
from penstock.clients.events import Finished, Usage
from penstock.clients.gateway.errors import GatewayError, from_failure
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.requests.chat import build_chat, build_chat_start, check_chat
from penstock.clients.gateway.requests.forced_calls import fill_calls
from penstock.clients.gateway.requests.formats import parser_maker
from penstock.clients.gateway.requests.response_tools import ResponseTools
from penstock.clients.gateway.requests.responses import as_chat, format_name
from penstock.clients.gateway.requests.start import check_model
from penstock.clients.gateway.responses.chat_stream import ChatReader
from penstock.clients.gateway.responses.http_response import StreamingOrWholeResponse
from penstock.clients.gateway.responses.response_events import ResponseEvents
from penstock.clients.gateway.routes.caller_route import ERRORS, CallerDep, CallerRoute
from penstock.clients.gateway.schemas.responses import InputTokens, ResponsesRequest
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.clients.gateway.upstream.upstream_request import Arrival, UpstreamRequest
from penstock.v1.model_pb2 import GetModelResponse
from penstock.v1.tokenizer_pb2 import RenderChatRequest

_log = logging.getLogger(__name__)
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's names for failures in a response, by HTTP code; all others are server_error."""


def make_router() -> APIRouter:
    """Makes the routes."""
    report = _HostedTools()
    router = APIRouter(route_class=CallerRoute, tags=["generation"])

    @router.post(
        "/v1/responses",
        response_model=dict[str, Any],
        responses=ERRORS,
        summary="Answer a conversation, with OpenAI's newer API",
        description="The stateless part of OpenAI's Responses API: nothing is stored, so each request has its whole "
        "input. With `stream`, the answer is a series of OpenAI's typed events; the last one has the whole answer.",
    )
    async def respond(body: ResponsesRequest, request: Request, caller: CallerDep) -> Response:
        converted = as_chat(body)
        report(converted.tools.hosted)
        chat, names = converted.chat, converted.names
        check_chat(chat, caller)
        new_parser, shows_special_tokens = await parser_maker(chat, caller)
        try:
            start = build_chat_start(chat, request.headers, caller)
        except GatewayError as error:
            raise error.with_param(format_name) from None
        await fill_calls(start, chat, caller)
        if shows_special_tokens:
            start.output.include_special_tokens = True
        reader = ChatReader(chat, caller, new_parser, specials=start.output.include_special_tokens)
        return StreamingOrWholeResponse(
            UpstreamRequest(caller, [start]),
            ResponseWriter(body, caller, reader, converted.tools),
            stream=bool(body.stream),
            keepalive_s=caller.settings.keepalive_s,
            caller_name=lambda _, field: names.caller_name(field),
            ends_with_done=False,
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
        call = RenderChatRequest(chat=build_chat(converted.chat))
        try:
            rendered = await caller.call(caller.stubs.tokenizer.RenderChat, call)
        except RequestFailed as failure:
            raise from_failure(failure, converted.names.caller_name) from None
        return InputTokens(input_tokens=len(rendered.token_ids))

    return router


class _HostedTools:
    """Logs each type of hosted tools once: most clients that send one send it in every request."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def __call__(self, types: Iterable[str]) -> None:
        for kind in {each.partition("_20")[0] for each in types} - self._reported:
            self._reported.add(kind)
            _log.warning("tools of type %s are not offered to the model: this service runs no hosted tools", kind)


class ResponseWriter:
    """Writes the events of a response."""

    def __init__(
        self, body: ResponsesRequest, caller: UpstreamCaller, reader: ChatReader, tools: ResponseTools
    ) -> None:
        self._settled = _settled(body, caller.model)
        self.num_kept_bytes = len(msgspec.json.encode(self._settled))
        self._reader = reader
        self._tools = replace(tools, functions=[], places=[], choice=None)  # the others identify the called tools
        self._events = ResponseEvents(self._settled, self._tools.named)
        self._usage = Usage()
        self._is_cut = False
        self._num_reasoning_tokens = 0

    def begin_response(self, request_id: str) -> list[Json]:
        """Returns the events before any output."""
        self._events = ResponseEvents({"id": f"resp_{request_id}"} | self._settled, self._tools.named)
        return self._events.begin_response()

    async def add_arrivals(self, arrivals: Sequence[Arrival]) -> list[Json]:
        """Returns the events of new output."""
        for _, event in arrivals:
            if isinstance(event, Finished):
                self._usage = event.usage
        events: list[Json] = []
        for part in await self._reader.read(arrivals):
            self._is_cut = part.finish_reason == "length"
            events += self._events.add_delta(part.piece, part.content_logprobs)
        if any(isinstance(event, Finished) for _, event in arrivals):
            self._num_reasoning_tokens = await self._reader.count_reasoning_tokens()
        return events

    def end(self) -> list[Json]:
        """Returns the last events, with the whole response."""
        return self._events.end(self._usage_json(), is_cut=self._is_cut)

    def failed(self, error: GatewayError) -> list[Json]:
        """Returns the last events of a failed response, with the output so far and the error."""
        return self._events.fail(_CODES.get(error.status, "server_error"), error.message)

    def whole(self) -> "WholeResponse":
        """Returns the combiner for a whole answer."""
        return WholeResponse()

    def _usage_json(self) -> Json:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        }


class WholeResponse:
    """Returns the response of the last event."""

    def __init__(self) -> None:
        self._response: Json = {}

    def add_chunk(self, chunk: Json) -> None:
        """Adds the next event."""
        self._response = chunk.get("response", self._response)

    def result(self) -> Json:
        """The response."""
        return self._response


def _settled(body: ResponsesRequest, model: GetModelResponse) -> Json:
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


def _default(model: GetModelResponse, name: Literal["temperature", "top_p"]) -> float:
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
"""Fields of a request that its response repeats."""

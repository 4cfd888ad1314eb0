"""Writes a response of the Responses API from the service's events: its fields, and the events of its output."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from penstock.clients.events import Finished, Usage
from penstock.clients.gateway.errors import GatewayError
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.requests.response_tools import ResponseTools
from penstock.clients.gateway.responses.chat_stream import ChatReader
from penstock.clients.gateway.responses.http_response import AnswerWriter
from penstock.clients.gateway.responses.response_events import ResponseEvents
from penstock.clients.gateway.schemas.responses import ResponsesRequest
from penstock.clients.gateway.upstream.upstream_request import Arrival
from penstock.v1 import Model

Keep = Callable[[Json], Awaitable[bool]]
"""Stores a complete response; returns whether it is stored."""
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's names for failures in a response, by HTTP code; all others are server_error."""


class WholeResponse:
    """Returns the response of the last event."""

    def __init__(self) -> None:
        self._response: Json = {}

    def add_chunk(self, chunk: Json) -> None:
        self._response = chunk.get("response", self._response)

    def result(self) -> Json:
        return self._response


class ResponseWriter(AnswerWriter):
    """Writes the events of a response."""

    whole = WholeResponse

    def __init__(
        self,
        settled: Json,
        reader: ChatReader,
        tools: ResponseTools,
        keep: Keep | None = None,
        num_input_bytes: int = 0,
    ) -> None:
        """``settled``: the fields that the request determines. ``keep`` is called with a response that is complete,
        which then has ``store: false`` if it is not stored, and needs ``num_input_bytes`` until then."""
        self._settled = settled
        self.num_kept_bytes = len(msgspec.json.encode(settled)) + num_input_bytes
        self._keep = keep
        self._has_ended = False
        self._reader = reader
        self._tools = replace(tools, functions=[], places=[], choice=None)  # the others identify the called tools
        self._events: ResponseEvents
        self._usage = Usage()
        self._is_cut = False

    @property
    def response(self) -> Json:
        """The response so far, with the items of its output that are complete."""
        return self._events.response | {"output": list(self._events.response["output"])}

    def begin_response(self, request_id: str) -> list[Json]:
        self._events = ResponseEvents(self._settled, self._tools.named)
        return self._events.begin_response()

    async def add_arrivals(self, arrivals: Sequence[Arrival]) -> list[Json]:
        has_finished = False
        for _, event in arrivals:
            if isinstance(event, Finished):
                self._usage = event.usage
                has_finished = True
        events: list[Json] = []
        for part in await self._reader.read(arrivals):
            self._is_cut = part.finish_reason == "length"
            events += self._events.add_part(part)
        if has_finished and self._keep is not None:
            closing = self.end()
            closing[-1]["response"]["store"] = await self._keep(closing[-1]["response"])
            return events + closing
        return events

    def end(self) -> list[Json]:
        """Returns the last events, with the whole response; only once."""
        if self._has_ended:
            return []
        self._has_ended = True
        return self._events.end(self._usage_json(), is_cut=self._is_cut)

    def failed(self, error: GatewayError) -> list[Json]:
        """Returns the last events of a failed response, with the output so far and the error."""
        if self._keep is not None:
            self._events.response["store"] = False
        return self._events.fail(_CODES.get(error.status, "server_error"), error.message)

    def cancelled(self) -> list[Json]:
        """Returns the last events of a cancelled response, with the output so far."""
        return self._events.cancel()

    def _usage_json(self) -> Json:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        }


def settled_fields(body: ResponsesRequest, model: Model, model_name: str, response_id: str, *, is_stored: bool) -> Json:
    """Returns the fields of a response that the request determines; most are copies of the request's."""
    given = body.model_dump(exclude_none=True, by_alias=True, include=_RETURNED)
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model_name,
        "background": bool(body.background),
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": is_stored,
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

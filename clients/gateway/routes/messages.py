"""POST /v1/messages: answers conversations in the format of Anthropic's API, through the same code as chat
completions."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.clients.events import Accepted, Finished, Usage
from penstock.clients.gateway.errors import AnthropicErrorBody, GatewayError
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.requests.chat import build_chat_start, check_chat, rendered_ids
from penstock.clients.gateway.requests.messages import as_chat
from penstock.clients.gateway.requests.sampling import check_model
from penstock.clients.gateway.responses.chat_stream import ChatReader
from penstock.clients.gateway.responses.http_response import AnswerWriter, StreamingOrWholeResponse
from penstock.clients.gateway.responses.message_events import MessageEvents, WholeMessage
from penstock.clients.gateway.routes.caller_route import GENERATION_ERRORS, CallerDep, CallerRoute
from penstock.clients.gateway.schemas.chat import ChatRequest
from penstock.clients.gateway.schemas.messages import CountTokensRequest, Message, MessagesRequest, TokenCount
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.clients.gateway.upstream.upstream_request import Arrival

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicErrorBody, "description": error["description"]}
    for status, error in GENERATION_ERRORS.items()
} | {400: {"model": AnthropicErrorBody, "description": "The request is invalid; the message names the field."}}
_OK: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer. With `stream`, Anthropic's events: `message_start`, the blocks, `message_delta` "
        "and `message_stop`.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


def make_router() -> APIRouter:
    """Makes the routes."""
    router = APIRouter(route_class=CallerRoute, tags=["generation"])

    @router.post(
        "/v1/messages",
        response_model=Message,
        responses=_ERRORS | _OK,
        summary="Answer a conversation, with Anthropic's API",
        description="Anthropic's Messages API: tools, thinking and streamed events. Errors have Anthropic's format.",
    )
    async def answer(body: MessagesRequest, request: Request, caller: CallerDep) -> Response:
        converted = as_chat(body)
        chat, names = converted.chat, converted.names
        if not caller.model.reasoning_parser:
            chat.thinking_token_budget = None  # clients send it whatever the model
        check_chat(chat, caller)
        try:
            start = build_chat_start(chat, request.headers, caller)
        except GatewayError as error:
            raise error.with_param(names.caller_name) from None
        return StreamingOrWholeResponse(
            caller,
            [start],
            MessageWriter(chat, caller),
            stream=bool(body.stream),
            caller_name=lambda _, field: names.caller_name(field),
            last=b"",
        )

    @router.post(
        "/v1/messages/count_tokens",
        responses={status: error for status, error in _ERRORS.items() if status != 409},
        summary="Count the tokens of a conversation",
        description="Counts the tokens in the prompt of a request to /v1/messages, without answering it.",
    )
    async def count(body: CountTokensRequest, caller: CallerDep) -> TokenCount:
        converted = as_chat(body)
        check_model(body.model, caller)
        token_ids = await rendered_ids(converted.chat, caller, converted.names.caller_name)
        return TokenCount(input_tokens=len(token_ids))

    return router


class MessageWriter(AnswerWriter):
    """Writes the events of a message."""

    whole = WholeMessage
    num_kept_bytes = 0

    def __init__(self, chat: ChatRequest, caller: UpstreamCaller) -> None:
        self._model = caller.model_name
        self._reader = ChatReader(chat, caller)
        self._events = MessageEvents()
        self._usage: Json = {}

    def begin_response(self, request_id: str) -> list[Json]:
        """Returns nothing: the first event has the number of prompt tokens, which is only known when the request is
        accepted."""
        return []

    async def add_arrivals(self, arrivals: Sequence[Arrival]) -> list[Json]:
        events: list[Json] = []
        for _, event in arrivals:
            if isinstance(event, Accepted):
                message = {"id": f"msg_{event.request_id}", "type": "message", "role": "assistant"}
                usage = _usage(Usage(prompt_tokens=event.prompt_tokens, cached_tokens=event.cached_tokens))
                events += self._events.begin(message | {"model": self._model, "usage": usage})
            elif isinstance(event, Finished):
                self._usage = _usage(event.usage)
        for part in await self._reader.read(arrivals):
            events += self._events.add_part(part)
        return events

    def end(self) -> list[Json]:
        return self._events.end(self._usage)

    def failed(self, error: GatewayError) -> list[Json]:
        """Returns the error as the last event."""
        return [error.anthropic_body()]


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }

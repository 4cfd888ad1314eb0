"""POST /v1/responses: answers conversations in the format of OpenAI's newer API, by the same path as chat completions.

``stored_responses.py`` has the paths of those that are stored.
"""

import logging
import secrets
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.clients.gateway.errors import GatewayError, invalid
from penstock.clients.gateway.requests.chat import build_chat_start, check_chat, rendered_ids
from penstock.clients.gateway.requests.responses import as_chat, format_name
from penstock.clients.gateway.requests.sampling import check_model
from penstock.clients.gateway.responses.chat_stream import ChatReader
from penstock.clients.gateway.responses.http_response import StreamingOrWholeResponse
from penstock.clients.gateway.responses.response_writer import ResponseWriter, settled_fields
from penstock.clients.gateway.routes.caller_route import ERRORS, GENERATION_ERRORS, CallerDep, CallerRoute
from penstock.clients.gateway.routes.stored_responses import Followed
from penstock.clients.gateway.schemas.responses import InputTokens, ResponsesRequest
from penstock.clients.gateway.stored.background import BackgroundRuns
from penstock.clients.gateway.stored.stored_response import StoredResponse, encoded_input, new_response_id
from penstock.clients.gateway.stored.stored_responses import StoredResponses
from penstock.clients.gateway.traffic import HELD_UNTIL_END

_log = logging.getLogger(__name__)


def make_router() -> APIRouter:
    """Makes the routes."""
    reported = set[str]()
    router = APIRouter(route_class=CallerRoute, tags=["generation"])

    @router.post(
        "/v1/responses",
        response_model=dict[str, Any],
        responses=GENERATION_ERRORS,
        summary="Answer a conversation, with OpenAI's newer API",
        description="OpenAI's Responses API. With `stream`, the answer is a series of OpenAI's typed events; the last "
        "one has the whole answer. With `previous_response_id`, the conversation goes on after a stored response.",
    )
    async def respond(body: ResponsesRequest, request: Request, caller: CallerDep) -> Response:
        stored: StoredResponses = request.app.state.stored_responses
        runs: BackgroundRuns = request.app.state.background_runs
        held: ExitStack = request.scope[HELD_UNTIL_END]
        _check_background(body, is_on=stored.is_on)
        earlier = await stored.earlier_turns(body.previous_response_id, caller.counted_as, held)
        converted = as_chat(body, earlier.items)
        for kind in {each.partition("_20")[0] for each in converted.tools.hosted} - reported:
            reported.add(kind)  # most clients that send a hosted tool send it in every request
            _log.warning("tools of type %s are not offered to the model: this service runs no hosted tools", kind)
        chat, caller_name = converted.chat, converted.names.caller_name
        check_chat(chat, caller)
        try:
            start = build_chat_start(chat, request.headers, caller)
        except GatewayError as error:
            raise error.with_param(format_name) from None
        if earlier.session_id and not start.session_id:
            start.session_id = earlier.session_id  # the next turn probably follows: the service retains the KV for it
        response = StoredResponse(
            new_response_id(),
            caller.counted_as,
            body.previous_response_id or "",
            earlier.session_id or secrets.token_hex(12),
            b"[]",
        )
        is_stored = stored.is_on and body.store is not False
        settled = settled_fields(body, caller.model, response.id, is_stored=is_stored)
        reader = ChatReader(chat, caller)
        if is_stored:
            response.input = encoded_input(body)
        if body.background:
            writer = ResponseWriter(settled, reader, converted.tools)
            run = await runs.start(response, start, writer, caller, caller_name, keeps_events=bool(body.stream))
            caller.keep_of_body(0)  # what is left of it counts as a stored response
            if body.stream:
                return Followed(run.follow(0, caller.settings.keepalive_s), run.request_id)
            data = msgspec.json.encode(run.snapshot())
            return Response(data, 200, {"x-request-id": run.request_id}, "application/json")
        keep = partial(stored.keep, response) if is_stored else None
        return StreamingOrWholeResponse(
            caller,
            [start],
            ResponseWriter(settled, reader, converted.tools, keep, len(response.input)),
            stream=bool(body.stream),
            caller_name=lambda _, field: caller_name(field),
            last=b"",
        )

    @router.post(
        "/v1/responses/input_tokens",
        responses=ERRORS,
        summary="Count the input tokens of a response",
        description="Counts the tokens in the prompt of a request to /v1/responses, without answering it.",
    )
    async def count(body: ResponsesRequest, request: Request, caller: CallerDep) -> InputTokens:
        stored: StoredResponses = request.app.state.stored_responses
        held: ExitStack = request.scope[HELD_UNTIL_END]
        earlier = await stored.earlier_turns(body.previous_response_id, caller.counted_as, held)
        converted = as_chat(body, earlier.items)
        check_model(body.model, caller)
        token_ids = await rendered_ids(converted.chat, caller, converted.names.caller_name)
        return InputTokens(input_tokens=len(token_ids))

    return router


def _check_background(body: ResponsesRequest, *, is_on: bool) -> None:
    """Raises GatewayError for a response in the background that would not be stored."""
    if not body.background:
        return
    if body.store is False:
        raise invalid("background", "not with store: false: the response could not be fetched")
    if not is_on:
        problem = "is not supported: this gateway stores nothing; stream the answer instead"
        raise invalid("background", problem, code="unsupported_parameter")

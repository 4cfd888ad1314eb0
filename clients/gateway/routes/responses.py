"""/v1/responses: answers conversations in the format of OpenAI's newer API, by the same path as chat completions.
Stored responses are fetched, followed, cancelled and deleted by their ids."""

import logging
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

import penstock.v1 as pb
from penstock.clients.gateway.errors import GatewayError, invalid
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.requests.chat import build_chat_start, check_chat, rendered_ids
from penstock.clients.gateway.requests.response_tools import ResponseTools
from penstock.clients.gateway.requests.responses import ChatOfResponse, as_chat, format_name
from penstock.clients.gateway.requests.sampling import check_model
from penstock.clients.gateway.responses.chat_stream import ChatReader
from penstock.clients.gateway.responses.http_response import StreamingOrWholeResponse
from penstock.clients.gateway.responses.response_writer import ResponseWriter, settled_fields
from penstock.clients.gateway.routes.caller_route import ERRORS, GENERATION_ERRORS, CallerDep, CallerRoute
from penstock.clients.gateway.schemas.responses import InputTokens, ResponsesRequest
from penstock.clients.gateway.stored.background import BackgroundRuns
from penstock.clients.gateway.stored.followed import Followed, logged_events
from penstock.clients.gateway.stored.stored_response import (
    StoredResponse,
    encoded_input,
    new_response_id,
    page_of_items,
)
from penstock.clients.gateway.stored.stored_responses import EarlierTurns, StoredResponses
from penstock.clients.gateway.traffic import HELD_UNTIL_END
from penstock.clients.gateway.upstream.service_link import UpstreamCaller

_SESSION_BYTES = 12

_log = logging.getLogger(__name__)


def make_router() -> APIRouter:
    """Makes the routes."""
    router = APIRouter(route_class=CallerRoute, tags=["generation"])
    add = partial(router.add_api_route, response_model=dict[str, Any], responses=ERRORS)
    add(
        "/v1/responses",
        respond,
        methods=["POST"],
        responses=GENERATION_ERRORS,
        summary="Answer a conversation, with OpenAI's newer API",
        description="OpenAI's Responses API. With `stream`, the answer is a series of OpenAI's typed events; the last "
        "one has the whole answer. With `previous_response_id`, the conversation goes on after a stored response.",
    )
    add(
        "/v1/responses/input_tokens",
        count,
        methods=["POST"],
        response_model=InputTokens,
        summary="Count the input tokens of a response",
        description="Counts the tokens in the prompt of a request to /v1/responses, without answering it.",
    )
    one = "/v1/responses/{response_id}"
    add(
        one,
        retrieve,
        methods=["GET"],
        summary="Fetch a stored response",
        description="With `stream`, the events of a response that was made with `background` and `stream`, from the "
        "one after `starting_after`, until the response has ended.",
    )
    add(one, delete, methods=["DELETE"], summary="Delete a stored response")
    add(f"{one}/cancel", cancel, methods=["POST"], summary="Cancel a response in the background")
    add(
        f"{one}/input_items",
        input_items,
        methods=["GET"],
        summary="List the items that a stored response answers",
        description="Those of the responses that it continues, and its own input.",
    )
    return router


class HostedTools:
    """Logs each type of hosted tool once: most clients that send one send it in every request."""

    def __init__(self) -> None:
        self._reported = set[str]()

    def report(self, tools: ResponseTools) -> None:
        for kind in {each.partition("_20")[0] for each in tools.hosted} - self._reported:
            self._reported.add(kind)
            _log.warning("tools of type %s are not offered to the model: this service runs no hosted tools", kind)


async def respond(body: ResponsesRequest, request: Request, caller: CallerDep) -> Response:
    """Answers, in the background or while the caller waits."""
    stored, runs = _stored(request), _runs(request)
    _check_background(body, is_on=stored.is_on)
    earlier = await _earlier(body, request, caller)
    converted = as_chat(body, earlier.items)
    request.app.state.hosted_tools.report(converted.tools)
    start = _start(converted, request, caller)
    if earlier.session_id and not start.session_id:
        start.session_id = earlier.session_id  # the next turn probably follows: the service retains the KV for it
    is_stored = stored.is_on and body.store is not False
    response = StoredResponse(
        new_response_id(),
        caller.counted_as,
        body.previous_response_id or "",
        earlier.session_id or secrets.token_hex(_SESSION_BYTES),
        encoded_input(body) if is_stored else b"[]",
    )
    settled = settled_fields(body, caller.model, caller.model_name, response.id, is_stored=is_stored)
    reader, caller_name = ChatReader(converted.chat, caller), converted.names.caller_name
    if body.background:
        writer = ResponseWriter(settled, reader, converted.tools)
        run = await runs.start(response, start, writer, caller, caller_name, keeps_events=bool(body.stream))
        caller.keep_of_body(0)  # what is left of it counts as a stored response
        if body.stream:
            return Followed(run.follow(0, caller.settings.keepalive_s), run.request_id)
        return _json(run.snapshot(), {"x-request-id": run.request_id})
    keep = partial(stored.keep, response) if is_stored else None
    return StreamingOrWholeResponse(
        caller,
        [start],
        ResponseWriter(settled, reader, converted.tools, keep, len(response.input)),
        stream=bool(body.stream),
        caller_name=lambda _, field: caller_name(field),
        last=b"",
    )


async def count(body: ResponsesRequest, request: Request, caller: CallerDep) -> InputTokens:
    """Counts the tokens of a prompt."""
    earlier = await _earlier(body, request, caller)
    converted = as_chat(body, earlier.items)
    check_model(body.model, caller)
    token_ids = await rendered_ids(converted.chat, caller, converted.names.caller_name)
    return InputTokens(input_tokens=len(token_ids))


async def retrieve(
    response_id: str,
    request: Request,
    caller: CallerDep,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """Returns a stored response, or its events."""
    response = _stored(request).find(response_id, caller.counted_as)
    run = _runs(request).run_of(response)
    if not stream:
        return _whole(response) if run is None else _json(run.snapshot())
    if run is not None and run.keeps_events:
        return Followed(run.follow(starting_after + 1, caller.settings.keepalive_s))
    if not response.content.log:
        raise invalid("stream", "only for a response that was made with background: true and stream: true")
    return Followed(logged_events(response.content.log, starting_after + 1))


async def delete(response_id: str, request: Request, caller: CallerDep) -> Response:
    """Deletes a stored response, and ends it if it is in the background."""
    response = _stored(request).find(response_id, caller.counted_as)
    await _runs(request).cancel(response)
    await _stored(request).delete(response)
    return _json({"id": response_id, "object": "response", "deleted": True})


async def cancel(response_id: str, request: Request, caller: CallerDep) -> Response:
    """Ends a response in the background."""
    response = _stored(request).find(response_id, caller.counted_as)
    if not response.content.field("background"):
        raise invalid("response_id", "this response was not made with background: true; disconnect to cancel one")
    await _runs(request).cancel(response)
    return _whole(_stored(request).find(response_id, caller.counted_as))  # it may have been deleted meanwhile


async def input_items(
    response_id: str,
    request: Request,
    caller: CallerDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """Returns a page of the items that a stored response answers."""
    response = _stored(request).find(response_id, caller.counted_as)
    items = await _stored(request).input_items(response)
    page = page_of_items(items, limit, after=after, newest_first=order == "desc")
    if page is None:
        raise invalid("after", "must be the id of an item of this response")
    return _json(page)


def _check_background(body: ResponsesRequest, *, is_on: bool) -> None:
    """Raises GatewayError for a response in the background that would not be stored."""
    if not body.background:
        return
    if body.store is False:
        raise invalid("background", "not with store: false: the response could not be fetched")
    if not is_on:
        problem = "is not supported: this gateway stores nothing; stream the answer instead"
        raise invalid("background", problem, code="unsupported_parameter")


async def _earlier(body: ResponsesRequest, request: Request, caller: UpstreamCaller) -> EarlierTurns:
    held: ExitStack = request.scope[HELD_UNTIL_END]
    return await _stored(request).earlier_turns(body.previous_response_id, caller.counted_as, held)


def _start(converted: ChatOfResponse, request: Request, caller: UpstreamCaller) -> pb.GenerationStart:
    """Builds the request to the service. Raises GatewayError."""
    check_chat(converted.chat, caller)
    try:
        return build_chat_start(converted.chat, request.headers, caller)
    except GatewayError as error:
        raise error.with_param(format_name) from None


def _stored(request: Request) -> StoredResponses:
    stored: StoredResponses = request.app.state.stored_responses
    return stored


def _runs(request: Request) -> BackgroundRuns:
    runs: BackgroundRuns = request.app.state.background_runs
    return runs


def _whole(response: StoredResponse) -> Response:
    return Response(response.content.as_json(), media_type="application/json")


def _json(answer: Json, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(answer), 200, headers, "application/json")

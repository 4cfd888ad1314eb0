"""The paths of stored responses: they are fetched, followed, cancelled and deleted by their ids."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.clients.gateway.errors import invalid
from penstock.clients.gateway.responses.http_response import SSE_HEADERS, send_part, until_gone
from penstock.clients.gateway.routes.caller_route import ERRORS, CallerDep, CallerRoute
from penstock.clients.gateway.stored.background import BackgroundRun, BackgroundRuns
from penstock.clients.gateway.stored.event_log import EventLog
from penstock.clients.gateway.stored.stored_response import StoredResponse, page_of_items
from penstock.clients.gateway.stored.stored_responses import StoredResponses

_ONE = "/v1/responses/{response_id}"


def make_router() -> APIRouter:
    """Makes the routes."""
    router = APIRouter(route_class=CallerRoute, tags=["generation"])

    @router.get(
        _ONE,
        response_model=dict[str, Any],
        responses=ERRORS,
        summary="Fetch a stored response",
        description="With `stream`, the events of a response that was made with `background` and `stream`, from the "
        "one after `starting_after`, until the response has ended.",
    )
    async def retrieve(
        response_id: str,
        request: Request,
        caller: CallerDep,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1)] = -1,
    ) -> Response:
        response = _stored(request).find(response_id, caller.counted_as)
        run = _runs(request).run_of(response)
        if not stream:
            return _whole(response, run)
        if run is not None and run.keeps_events:
            return Followed(run.follow(starting_after + 1, caller.settings.keepalive_s))
        if not response.content.log:
            raise invalid("stream", "only for a response that was made with background: true and stream: true")
        return Followed(_logged(response.content.log, starting_after + 1))

    @router.delete(_ONE, response_model=dict[str, Any], responses=ERRORS, summary="Delete a stored response")
    async def delete(response_id: str, request: Request, caller: CallerDep) -> Response:
        response = _stored(request).find(response_id, caller.counted_as)
        await _runs(request).cancel(response)
        await _stored(request).delete(response)
        return _json({"id": response_id, "object": "response", "deleted": True})

    @router.post(
        f"{_ONE}/cancel", response_model=dict[str, Any], responses=ERRORS, summary="Cancel a response in the background"
    )
    async def cancel(response_id: str, request: Request, caller: CallerDep) -> Response:
        response = _stored(request).find(response_id, caller.counted_as)
        if not response.content.field("background"):
            raise invalid("response_id", "this response was not made with background: true; disconnect to cancel one")
        await _runs(request).cancel(response)
        return _whole(response, None)

    @router.get(
        f"{_ONE}/input_items",
        response_model=dict[str, Any],
        responses=ERRORS,
        summary="List the items that a stored response answers",
        description="Those of the responses that it continues, and its own input.",
    )
    async def input_items(
        response_id: str,
        request: Request,
        caller: CallerDep,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        response = _stored(request).find(response_id, caller.counted_as)
        items = await _stored(request).input_items(response)
        page = page_of_items(items, limit, after=after, newest_first=order == "desc")
        if page is None:
            raise invalid("after", "must be the id of an item of this response")
        return _json(page)

    return router


class Followed(Response):
    """A stream of events that others generate; when the client disconnects, only the stream ends."""

    def __init__(self, events: AsyncIterator[bytes], request_id: str = "") -> None:
        """``request_id``: the service's id, if the stream belongs to a request that it has just accepted."""
        super().__init__()
        self._events = events
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send), name="penstock-gateway-follow")
        watcher = asyncio.create_task(until_gone(receive), name="penstock-gateway-watch")
        try:
            await asyncio.wait({sending, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            watcher.cancel()

    async def _send(self, send: Send) -> None:
        own = [(b"x-request-id", self._request_id.encode())] if self._request_id else []
        await send({"type": "http.response.start", "status": 200, "headers": [*SSE_HEADERS, *own]})
        async for data in self._events:
            await send_part(send, data)
        await send_part(send, b"", more=False)


def _stored(request: Request) -> StoredResponses:
    stored: StoredResponses = request.app.state.stored_responses
    return stored


def _runs(request: Request) -> BackgroundRuns:
    runs: BackgroundRuns = request.app.state.background_runs
    return runs


def _whole(response: StoredResponse, run: BackgroundRun | None) -> Response:
    return Response(response.content.as_json(), media_type="application/json") if run is None else _json(run.snapshot())


def _json(answer: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _logged(log: bytes, first: int) -> AsyncIterator[bytes]:
    events = EventLog.decoded(log)
    while first < len(events):
        data, first = events.read(first)
        yield data

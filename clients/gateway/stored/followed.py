"""Sends the events of a response that is, or was, generated in the background."""

import asyncio
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.clients.gateway.responses.http_response import SSE_HEADERS, send_part, until_gone
from penstock.clients.gateway.stored.event_log import EventLog


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


async def logged_events(log: bytes, first: int) -> AsyncIterator[bytes]:
    """Yields the events of an encoded log from number ``first`` on."""
    events = EventLog.decoded(log)
    while first < len(events):
        data, first = events.read(first)
        yield data

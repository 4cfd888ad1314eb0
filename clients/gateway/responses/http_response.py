"""Responds to an HTTP request with the output of the service, streamed or whole, by one path.

A whole answer is combined from exactly the chunks of a streamed one. A caller that disconnects cancels the request.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import penstock.v1 as pb
from penstock.clients.errors import RequestFailed
from penstock.clients.events import Event
from penstock.clients.gateway.errors import GatewayError, as_gateway_error
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.requests.resumption import TICKET_HEADER, shown_ticket
from penstock.clients.gateway.responses.chunking import encoded, portions
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.clients.gateway.upstream.upstream_request import Abandoned, Arrival, UpstreamRequest
from penstock.clients.host.error_frames import release_frames

SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes each part on immediately
)
KEEP_ALIVE = b"\n\n"
"""An empty event, which dispatches nothing. Not a comment: programs that strip lines join a comment to the next
event."""
_LINE_ENDS = ((b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"), (b"\xc2\x85", rb"\u0085"))
"""Characters that JSON allows unescaped and that some clients treat as line ends: U+2028, U+2029 and U+0085."""
_encode = msgspec.json.encode
BODY_WRITER = "penstock.body_writer"
"""The key in a request's scope for the server's ``BodyWriter``; other servers have none."""


class BodyWriter(Protocol):
    """Writes parts of a response's body without ASGI's ``send``, whose coroutines cost more than the system call."""

    @property
    def is_ready(self) -> bool:
        """Whether parts may be written: the response has begun, and the client reads it."""

    def write(self, data: bytes) -> None:
        """Writes a part, soon and before whatever is sent later. Only while ``is_ready``."""


class Whole(Protocol):
    """Combines chunks into one answer."""

    def add_chunk(self, chunk: Json) -> None:
        """Adds the next chunk and takes ownership of it."""

    def result(self) -> Json:
        """Returns the answer."""


class AnswerWriter(Protocol):
    """Converts the service's events to the chunks of an answer."""

    num_kept_bytes: int
    """How many bytes of the request's body the answer still needs."""

    def begin_response(self, request_id: str) -> list[Json]:
        """Returns the chunks before any output, once the service has accepted the request."""

    async def add_arrivals(self, arrivals: Sequence[Arrival]) -> list[Json]:
        """Returns the chunks of new events. Raises RequestFailed."""

    def text_event(self, index: int, event: Event) -> bytes | None:
        """Returns the chunk of an event that adds only text, formatted as by ``as_event``, if the writer has a template
        for it. None, without any effect, if ``add_arrivals`` must handle the event."""
        return None

    def end(self) -> list[Json]:
        """Returns the chunks after the last event of a successful request."""

    def failed(self, error: GatewayError) -> list[Json]:
        """Returns the chunks that replace ``end`` if a streamed answer fails."""

    def whole(self) -> Whole:
        """Returns the combiner for an answer that is not streamed."""


class StreamingOrWholeResponse(Response):
    """The response of a route. Sends the status line only after the service has accepted the request, so that a refusal
    has its own status."""

    def __init__(
        self,
        caller: UpstreamCaller,
        starts: Sequence[pb.GenerationStart],
        writer: AnswerWriter,
        *,
        stream: bool,
        caller_name: Callable[[int, str], str],
        last: bytes = b"data: [DONE]\n\n",
        shows_ticket: bool = False,
    ) -> None:
        """``caller_name``: returns the caller's name of a field of one of the upstream requests. ``last`` ends a
        stream. A chunk with a key ``type`` is sent as an event of that name, as in the Responses API. ``shows_ticket``:
        whether the headers of a stream have the ticket that continues it."""
        super().__init__()
        self._caller = caller
        self._upstream_request = UpstreamRequest(caller, starts)
        self._writer = writer
        self._stream = stream
        self._caller_name = caller_name
        self._last = last
        self._shows_ticket = shows_ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(until_gone(receive), name="penstock-gateway-watch")
        watcher.add_done_callback(lambda _: self._upstream_request.abandon())
        has_begun = False
        try:
            self._upstream_request.send_requests()
            await self._upstream_request.accepted()
            self._caller.keep_of_body(self._writer.num_kept_bytes)
            if self._stream:
                has_begun = True
                await self._send_stream(send, scope.get(BODY_WRITER))
            else:
                await self._send_whole(scope, receive, send)
        except Abandoned:
            pass
        except (GatewayError, RequestFailed) as failure:
            release_frames(failure)  # the upstream request keeps it
            error = as_gateway_error(failure, partial(self._caller_name, self._upstream_request.failed_index))
            if has_begun:
                await send_part(send, _events(self._writer.failed(error)) + self._last, more=False)
            else:
                await error.response(scope["path"])(scope, receive, send)
        finally:
            self._upstream_request.close()
            watcher.cancel()

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        upstream_request, writer, whole = self._upstream_request, self._writer, self._writer.whole()
        chunks = writer.begin_response(upstream_request.request_id)
        for num_before, portion in enumerate(portions(await upstream_request.collect())):
            if num_before:
                await asyncio.sleep(0)
            for chunk in chunks + await writer.add_arrivals(portion):
                whole.add_chunk(chunk)
            chunks = []
        for chunk in writer.end():
            whole.add_chunk(chunk)
        answer = whole.result()
        body = await encoded(answer) if num_before else _encode(answer)
        headers = {"x-request-id": upstream_request.request_id}
        await Response(body, 200, headers, "application/json")(scope, receive, send)

    async def _send_stream(self, send: Send, body_writer: BodyWriter | None) -> None:
        upstream_request, writer = self._upstream_request, self._writer
        headers = [*SSE_HEADERS, (b"x-request-id", upstream_request.request_id.encode())]
        if self._shows_ticket and upstream_request.resume_ticket:
            headers.append((TICKET_HEADER.encode(), shown_ticket(upstream_request.resume_ticket).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        pending = _events(writer.begin_response(upstream_request.request_id))

        async def pass_on(arrivals: Sequence[Arrival]) -> None:
            nonlocal pending
            for number, portion in enumerate(portions(arrivals)):
                if number:
                    await asyncio.sleep(0)
                data = pending + _events(await writer.add_arrivals(portion))
                if data or not portion:
                    pending = b""
                    ticks.postpone()
                    await send_part(send, data or KEEP_ALIVE)

        def pass_on_now(index: int, event: Event) -> bool:
            if pending or body_writer is None or not body_writer.is_ready:
                return False
            if (data := writer.text_event(index, event)) is None:
                return False
            ticks.postpone()
            body_writer.write(data)
            return True

        with _Ticks(self._caller.settings.keepalive_s, upstream_request.nudge) as ticks:
            await upstream_request.pass_on(pass_on, pass_on_now)
        await send_part(send, pending + _events(writer.end()) + self._last, more=False)


class _Ticks:
    """Calls ``tick`` whenever it has not been postponed for a number of seconds; 0: never."""

    def __init__(self, seconds: float, tick: Callable[[], None]) -> None:
        self._seconds = seconds
        self._tick = tick
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> "_Ticks":
        if self._seconds:
            self.postpone()
            self._timer = self._loop.call_at(self._due, self._check)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def postpone(self) -> None:
        """Starts the wait again. Sets no timer, since it is called for each token."""
        self._due = self._loop.time() + self._seconds

    def _check(self) -> None:
        if self._loop.time() >= self._due:
            self._tick()
            self.postpone()
        self._timer = self._loop.call_at(self._due, self._check)


async def until_gone(receive: Receive) -> None:
    """Returns when the caller has disconnected, after the request's body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_part(send: Send, data: bytes, *, more: bool = True) -> None:
    """Sends a part of a body; without ``more``, the last one."""
    await send({"type": "http.response.body", "body": data, "more_body": more})


def _events(chunks: Sequence[Json]) -> bytes:
    """Formats chunks as server-sent events (HTML living standard, 9.2)."""
    return b"".join([as_event(chunk) for chunk in chunks])


def as_event(chunk: Json) -> bytes:
    """Formats one chunk as a server-sent event."""
    kind, data = chunk.get("type"), _encode(chunk)
    data = _without_line_ends(data)
    if kind is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _without_line_ends(data: bytes) -> bytes:
    for line_end, escaped in _LINE_ENDS:
        if line_end in data:
            data = data.replace(line_end, escaped)
    return data


class TextTemplate:
    """Formats events that differ only in one text, without making the chunk of each."""

    _MARK = "\0"

    def __init__(self, chunk_with: Callable[[str], Json]) -> None:
        """``chunk_with`` returns the chunk that has a text; the text must be the last of the chunk's values that
        vary."""
        before, _, after = as_event(chunk_with(self._MARK)).rpartition(_encode(self._MARK))
        self._before, self._after = before, after

    def event(self, text: str) -> bytes:
        """Returns the same as ``as_event`` of the chunk that has this text."""
        data = _encode(text)
        if not text.isascii():
            data = _without_line_ends(data)
        return b"%b%b%b" % (self._before, data, self._after)

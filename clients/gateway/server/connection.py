"""One connection of the gateway: limits incomplete requests in size and time, and serves one request at a time."""

import asyncio
import re
import socket
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.clients.gateway.server.connection_places import ConnectionPlaces
from penstock.clients.gateway.server.http_parser import RequestParser
from penstock.clients.gateway.server.paced_body import BodyPacer, with_paced_body
from penstock.clients.gateway.traffic import CALLER

_MAX_HEAD_BYTES = 64 << 10
"""The limit on the size of a head, one chunk's extension, or trailers. Data that arrives complete in one read may be
larger."""
_ABSOLUTE = re.compile(rb"[a-zA-Z][a-zA-Z0-9+.-]*://([^/?#]*)")
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class TimeoutHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits for connections that send no complete head or do not read the response: each holds
    a place, and uvicorn waits forever. Pipelining is not supported, since uvicorn would stop reading and not
    notice that the caller disconnects: the running request becomes the connection's last."""

    _due: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _num_head = 0
    """Bytes since the end of a head or the last part of a body."""
    _is_last = False
    """Whether data after the running request is discarded: it was pipelined, and the client sends it again."""

    def __init__(
        self, *, places: ConnectionPlaces, pacer: BodyPacer, head_s: float, write_timeout_s: float, **given: Any
    ) -> None:
        super().__init__(**given)
        self._places = places
        self._pacer = pacer
        self.parser = RequestParser(self)  # type: ignore[assignment]
        self._head_s = head_s
        self._write_timeout_s = write_timeout_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._places.enter(self)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_head()
        self._have_reader()
        self._places.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Limits data outside requests. Data after the last request is still read, so that the connection's end is
        noticed."""
        if self._is_last:
            return
        self._num_head += len(data)
        super().data_received(data)
        if self._is_last or self.transport.is_closing():
            return
        if self._num_head > _MAX_HEAD_BYTES:
            self._refuse()
        elif not self._is_answering() and self.timeout_keep_alive_task is None:
            self._await_head()  # no route awaits the rest of a body after an early response

    def send_400_response(self, msg: str) -> None:
        """Sends the error, unless a response to a complete request has begun."""
        if not self._is_last:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        if self._is_answering():
            self._is_last = True
            self.parser.is_muted = True  # type: ignore[attr-defined]
            self.cycle.keep_alive = False
        else:
            super().on_message_begin()
            self._await_head()

    def on_headers_complete(self) -> None:
        """Handles the end of a head; the route limits the body's time."""
        self._num_head = 0
        self._have_head()
        self._read_absolute_target()
        self._places.mark_busy(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Handles a part of a body; the app limits its size."""
        self._num_head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Handles a full write buffer. On TCP the kernel limits the time (see ``http_server.py``); on a Unix socket a
        timer does."""
        super().pause_writing()
        self._places.fall_behind(self)
        if self.transport.get_extra_info("socket").family == socket.AF_UNIX:
            self._await_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._have_reader()
        self._places.catch_up(self)
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Marks the connection as idle: the whole response was written, although perhaps not sent."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._places.end(self)

    @property
    def tenant(self) -> str:
        caller = None if self.cycle is None else self.cycle.scope["state"].get(CALLER)
        return "" if caller is None else str(caller.counted_as)

    @property
    def num_unread(self) -> int:
        return self.transport.get_write_buffer_size()

    def cut(self) -> None:
        self.connections.discard(self)  # so that it is no longer counted
        self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        is_old = cycle.scope["http_version"] == "1.0"
        wrapped = _without_chunks(app, cycle) if is_old else with_paced_body(app, cycle, self._pacer)
        super()._start_asgi_task(cycle, wrapped)  # type: ignore[arg-type]

    def _read_absolute_target(self) -> None:
        """A target with a host, as sent to proxies, takes precedence over the header (RFC 9112, 3.2.2)."""
        if (found := _ABSOLUTE.match(self.url)) is None:
            return
        self.url = self.url[found.end() :]
        if not self.url.startswith(b"/"):
            self.url = b"/" + self.url
        names = [name for name, _ in self.headers]
        if names.count(b"host") == 1:  # any other number is refused
            self.headers[names.index(b"host")] = (b"host", found[1])

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self) -> None:
        if self._is_answering():
            self.transport.abort()
        else:
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def _await_reader(self, num_unread: int) -> None:
        self._unread = self.loop.call_later(self._write_timeout_s, self._check_reader, num_unread)

    def _check_reader(self, num_unread: int) -> None:
        if (now_unread := self.transport.get_write_buffer_size()) < num_unread:
            self._await_reader(now_unread)
        else:
            self.transport.abort()

    def _have_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _await_head(self) -> None:
        if self._due is None:
            self._due = self.loop.call_later(self._head_s, self.transport.close)

    def _have_head(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


def _without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Wraps the app for a client of HTTP/1.0, which does not support chunks: a response without a length ends with its
    connection."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = False

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer

"""Writes the parts of streamed bodies together: those of all connections at the same time, with pauses in between."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from penstock.clients.gateway.responses.http_response import BODY_WRITER

PAUSE_S = 0.0002
"""The pause for each written body. A write costs about a twentieth of that, mostly for its system call, and the model's
worker may share the cores. Tokens that arrive in a pause wait for its end. With one stream, or with steps that take
longer than the pause, each token is written at once."""
MAX_PAUSE_S = 0.005
"""The maximum pause, which no reader notices, however many streams there are."""


class BodyPacer:
    """Flushes bodies in turns of the event loop that are far enough apart. For the event loop's thread only."""

    def __init__(self, pause_s: float = PAUSE_S, max_pause_s: float = MAX_PAUSE_S) -> None:
        self._pause_s = pause_s
        self._max_pause_s = max_pause_s
        self._waiting: list[PacedBody] = []
        self._rests_until = 0.0

    def flush_later(self, body: "PacedBody") -> None:
        """Flushes a body in the next turn: at the end of this turn of the event loop, or of the pause."""
        self._waiting.append(body)
        if len(self._waiting) > 1:
            return
        loop = asyncio.get_running_loop()
        if self._rests_until > loop.time():
            loop.call_at(self._rests_until, self._flush_all)
        else:
            loop.call_soon(self._flush_all)

    def _flush_all(self) -> None:
        bodies, self._waiting = self._waiting, []
        for body in bodies:
            body.flush()
        self._rests_until = asyncio.get_running_loop().time() + min(len(bodies) * self._pause_s, self._max_pause_s)


class PacedBody:
    """The body of one response; see ``BodyWriter``."""

    def __init__(self, cycle: RequestResponseCycle, pacer: BodyPacer) -> None:
        self._cycle = cycle
        self._pacer = pacer
        self._parts: list[bytes] = []
        self._has_begun = False

    @property
    def is_ready(self) -> bool:
        cycle = self._cycle
        is_open = cycle.chunked_encoding and not cycle.response_complete and not cycle.disconnected
        return bool(is_open) and not cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        self._parts.append(data)
        if not self._has_begun:
            self._has_begun = True
            self.flush()  # the first token never waits
        elif len(self._parts) == 1:
            self._pacer.flush_later(self)

    def flush(self) -> None:
        """Writes what waits, as one chunk, in the way of uvicorn's ``send``."""
        parts, self._parts = self._parts, []
        if parts and not self._cycle.transport.is_closing():
            data = b"".join(parts)
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def with_paced_body(app: ASGIApp, cycle: RequestResponseCycle, pacer: BodyPacer) -> ASGIApp:
    """Wraps the app, so that it can write to a ``PacedBody`` as well as send."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        body = PacedBody(cycle, pacer)

        async def send_in_order(message: Message) -> None:
            body.flush()
            await send(message)

        scope[BODY_WRITER] = body
        try:
            await app(scope, receive, send_in_order)
        finally:
            del scope[BODY_WRITER]  # the cycle has the scope: a reference cycle
            body.flush()

    return answer

"""One generation request that is served by one call, whose messages are its output."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2

import penstock.v1 as pb
from penstock.service.errors import StatusError
from penstock.service.requests.generate import ResponseMode
from penstock.service.requests.live.lifecycle import RequestLifecycle
from penstock.service.streaming.outbox import Outbox
from penstock.service.streaming.pending_message import PendingMessage

Context = grpc.aio.ServicerContext[Any, Any]


class Requests(Protocol):
    """Creates what a call needs."""

    def new_request(
        self,
        start: pb.GenerationStart,
        receiver: Outbox,
        on_end: Callable[[RequestLifecycle], None],
        call: Context,
        answer: ResponseMode,
        /,
    ) -> RequestLifecycle:
        """Creates a request of the current caller."""

    def new_outbox(self, write: Any, encode: Any, on_stall: Callable[[bool], None], /) -> Outbox:
        """Creates an outbox for the call's messages."""


def status_error(status: status_pb2.Status) -> StatusError | None:
    """Returns the error that ends the call of a request with this status; None if it succeeded."""
    return StatusError(status) if status.code else None


class SingleCall:
    """A call and its request. A refusal is only the call's status, with no message before it, so that clients and
    proxies may retry."""

    def __init__(
        self,
        requests: Requests,
        start: pb.GenerationStart,
        context: Context,
        encode: Callable[[PendingMessage], Sequence[Message]],
        answer: ResponseMode = ResponseMode.STREAMED,
        *,
        beats: bool = False,
        error_of: Callable[[status_pb2.Status], StatusError | None] = status_error,
    ) -> None:
        """``encode`` builds the call's messages. ``beats``: whether heartbeats are sent after the first message.
        ``error_of`` returns the error that ends the call for the status of its request."""
        self._context = context
        self._beats = beats
        self._error_of = error_of
        self._has_begun = False
        self._outbox = requests.new_outbox(self._write, encode, self._hold)
        self.live = requests.new_request(start, self._outbox, self._on_end, context, answer)

    async def run(self, start: pb.GenerationStart) -> None:
        """Serves the request to its end. ``start`` is the constructor's. Raises StatusError."""
        self._outbox.opened()
        self.live.begin_request(start)
        try:
            await self._outbox.run()
        finally:
            self.live.cancel()
            del self._context  # gRPC ends the call when nothing refers to it, and the request refers to this object

    async def _write(self, raw: bytes) -> None:
        if not self._has_begun:
            # Sent separately: sent together with a message that is blocked, no status could overtake it.
            self._has_begun = True
            # Not before: a heartbeat would prevent proxies from retrying elsewhere.
            self._outbox.begin_beats(sends=self._beats)
            await self._context.send_initial_metadata(())
        await self._context.write(raw)

    def _hold(self, held: bool) -> None:
        self.live.hold(held)

    def _on_end(self, live: RequestLifecycle) -> None:
        error = self._error_of(live.status)
        if error is not None and not live.was_accepted:
            self._outbox.fail(error)
        else:
            self._outbox.close(error)

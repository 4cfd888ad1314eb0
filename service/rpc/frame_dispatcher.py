"""One multiplexed stream: applies the client's frames, and reports in band those that are refused."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import penstock.v1 as pb
from penstock.service.config.limits import Validator
from penstock.service.errors import Reason, ServiceError, invalid, to_status
from penstock.service.requests.live.injection import Refuse
from penstock.service.requests.live.lifecycle import RequestLifecycle
from penstock.service.streaming.outbox import Outbox
from penstock.service.transport.request_id import new_request_id

MAX_REFUSED_IN_A_ROW = 64
REFUSED_PAUSE_S = 0.005
"""The pause before each further frame, until a request is accepted. Without it, a client that keeps sending requests
that are refused could take all of the event loop's time. No frame is lost, and running requests continue."""

_KINDS: dict[str, "pb.FrameKind.ValueType"] = {
    "start": pb.FRAME_KIND_START,
    "cancel": pb.FRAME_KIND_CANCEL,
    "update": pb.FRAME_KIND_UPDATE,
    "append": pb.FRAME_KIND_APPEND,
    "commit": pb.FRAME_KIND_COMMIT,
}


class NewRequest(Protocol):
    """Creates a request of the stream's caller."""

    def __call__(
        self, start: pb.GenerationStart, receiver: Outbox, on_end: Callable[[RequestLifecycle], None], /
    ) -> RequestLifecycle:
        """``on_end`` is called after the request's end."""


class FrameDispatcher:
    """The requests of one stream."""

    def __init__(self, new_request: NewRequest, outbox: Outbox, validator: Validator) -> None:
        self._new_request = new_request
        self._outbox = outbox
        self._validator = validator
        self._live: dict[int, RequestLifecycle] = {}
        self._last: asyncio.Task[None] | None = None
        self._half_closed = False
        self._num_refused = 0
        """Consecutive frames that were refused, starts only if they were before preparation: a refusal by a full queue,
        which is not the client's fault, does not count."""

    async def read(self, frames: AsyncIterator[pb.GenerateRequest | ServiceError]) -> None:
        """Handles frames until the client half-closes. An error is that of a frame that was not parsed."""
        async for frame in frames:
            num_refused = self._num_refused
            if isinstance(frame, ServiceError):
                self._refuse(0, pb.FRAME_KIND_UNSPECIFIED, frame)
            else:
                self._take(frame)
            del frame  # it may be megabytes, and the next one may not arrive for hours
            if self._num_refused > max(num_refused, MAX_REFUSED_IN_A_ROW):
                await asyncio.sleep(REFUSED_PAUSE_S)

    def on_read(self, reader: asyncio.Task[None]) -> None:
        """Handles the reader's end: no more frames will arrive."""
        if reader.cancelled():
            # At the handler's end this no longer matters; at any other time it is an internal error.
            self._outbox.fail(RuntimeError("the reader of a stream was cancelled"))
        elif (error := reader.exception()) is not None:
            self._outbox.fail(error if isinstance(error, Exception) else RuntimeError("the reader of a stream died"))
        else:
            for live in list(self._live.values()):
                self._commit(live)
        self._half_closed = True
        self._close_if_done()

    def hold(self, held: bool) -> None:
        """Pauses the stream's requests, so that they take no part in steps, or resumes them. ``held``: whether the
        client has stopped reading."""
        for live in list(self._live.values()):
            live.hold(held)

    def drop(self) -> None:
        for live in list(self._live.values()):
            live.cancel()

    def _take(self, frame: pb.GenerateRequest) -> None:
        name = frame.WhichOneof("frame")
        kind = _KINDS.get(name or "", pb.FRAME_KIND_UNSPECIFIED)
        try:
            match name:
                case "start":
                    self._start(frame.start)
                case "cancel":
                    self._validator.check(frame.cancel)
                    for ref in frame.cancel.refs:
                        if (live := self._live.get(ref)) is not None:
                            live.cancel()
                case "update":
                    self._validator.check(frame.update)
                    if (live := self._live.get(frame.update.ref)) is not None:
                        live.update(frame.update, self._refuser(live, kind))
                case "append":
                    live = self._find(frame.append.ref)
                    live.append(frame.append, self._refuser(live, kind, frame.append.append_id))
                case "commit":
                    if not self._commit(self._find(frame.commit.ref)):
                        raise ServiceError(Reason.NOT_OPEN)
                case _:
                    raise invalid("frame", f"is required; set one of {', '.join(_KINDS)}")
        except ServiceError as error:
            ref = getattr(getattr(frame, name), "ref", 0) if name is not None else 0
            live = self._live.get(ref) if name != "start" else None  # a start is a request of its own
            self._refuse(ref, kind, error, "" if live is None else live.request_id, frame.append.append_id)

    def _start(self, start: pb.GenerationStart) -> None:
        if not start.ref:
            raise ServiceError(Reason.MISSING_REF, field="start.ref")
        if start.ref in self._live:
            raise ServiceError(
                Reason.DUPLICATE_REF,
                f"start.ref: {start.ref} is live on this stream; choose another",
                field="start.ref",
            )
        live = self._new_request(start, self._outbox, self._on_end)
        self._live[start.ref] = live
        self._outbox.opened()
        live.hold(self._outbox.is_stalled)
        live.begin_request(start, self._last, self._live.get(start.supersedes), takes_appends=True)
        self._num_refused = self._num_refused + 1 if live.has_ended else 0
        self._last = live.preparation or self._last

    def _commit(self, live: RequestLifecycle) -> bool:
        was_open = live.commit(self._last)
        if was_open:
            self._last = live.preparation or self._last
        return was_open

    def _find(self, ref: int) -> RequestLifecycle:
        live = self._live.get(ref)
        if live is None:
            raise ServiceError(Reason.UNKNOWN_REF, field="ref")
        return live

    def _refuser(self, live: RequestLifecycle, kind: "pb.FrameKind.ValueType", append_id: int = 0) -> Refuse:
        return lambda error: self._refuse(live.ref, kind, error, live.request_id, append_id)

    def _refuse(
        self,
        ref: int,
        kind: "pb.FrameKind.ValueType",
        error: ServiceError,
        request_id: str = "",
        append_id: int = 0,
    ) -> None:
        self._num_refused += 1
        status = to_status(error, request_id or new_request_id())
        self._outbox.frame_refused(pb.FrameRefused(ref=ref, status=status, frame=kind, append_id=append_id))

    def _on_end(self, live: RequestLifecycle) -> None:
        del self._live[live.ref]
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._half_closed and not self._live:
            self._outbox.close()

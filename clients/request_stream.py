"""One request of the asynchronous client, as a stream of events."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Self

import grpc

import penstock.v1 as pb
from penstock.clients.errors import PenstockError, RequestFailed
from penstock.clients.events import Completion, Delta, Event, Finished, collect
from penstock.clients.failover.carried_request import CarriedRequest, OpenStream
from penstock.clients.requests import Prompt, build_append, build_update
from penstock.clients.stream import Mailbox

_DEADLINE_GRACE_SECONDS = 5.0


class RequestStream:
    """One request, from its start to its end, as events.

    It starts with ``async with`` or with the first event that is awaited. Leaving ``async with`` or the loop before the
    end cancels it. A request that fails raises RequestFailed from the loop, after the events that came before.
    """

    def __init__(
        self,
        open_stream: OpenStream,
        start: pb.GenerationStart,
        num_targets: int = 1,
        on_move: Callable[[], None] = lambda: None,
    ) -> None:
        """With several targets, the request continues at another one when its own dies; ``on_move`` is then called."""
        self._open_stream = open_stream
        self._start = start
        self._num_targets = num_targets
        self._on_move = on_move
        self._carried: CarriedRequest | None = None
        self._mailbox = Mailbox()
        self._older: RequestStream | None = None
        self._num_appends = 0
        self._ended = False
        self._cancelled = False
        self._give_up_at: float | None = None
        self._limit: asyncio.Timeout | None = None
        """Enforces ``_give_up_at`` while events are awaited."""

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.leave()

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            while events := await self.take():
                for event in events:
                    yield event
        finally:
            self.leave()

    @property
    def request_id(self) -> str:
        """The service's id of the request; empty until it is accepted."""
        return self._mailbox.request_id

    async def take(self) -> list[Event]:
        """Waits for events and returns all since the last call. Returns an empty list once the request has ended."""
        return await self._receive(rest=False)

    async def completion(self) -> Completion:
        """Collects the remaining events into a ``Completion``."""
        events: list[Event] = []
        while more := await self._receive(rest=True):
            events += more
        if not events:
            raise PenstockError("the request has ended, and its events were taken already")
        return collect(events, max(1, self._start.sampling.n))

    def supersede(self, older: "RequestStream") -> None:
        """Lets this request, which has not begun, replace an older one of the same client. When it is accepted, the
        older one ends: its events end with a ``Finished`` that is ``superseded``. If it is refused, the older one
        continues. Does nothing if this one has begun, or if the older one has not begun or has ended."""
        if self._carried is None:
            self._older = older

    def cancel(self) -> None:
        """Requests an early end. Events continue until ``Finished``, which has the usage so far."""
        self._cancelled = True
        if self._carried is not None:
            self._carried.cancel()

    def update(
        self, *, timeout: float | None = None, priority: int | None = None, max_tokens: int | None = None
    ) -> None:
        """Changes the request while it runs; ``timeout`` is in seconds from now. If the service refuses, nothing
        changes, and a ``FrameRefused`` is among the events. Raises InvalidOption."""
        update = build_update(timeout, priority, max_tokens)
        if self._carried is None:
            self._amend(update)
        elif not self._ended:
            self._carried.update(update)
            if update.HasField("timeout_ms"):
                self._expect_end_within(update.timeout_ms / 1000)

    def append(self, content: Prompt, *, replace_from: int | None = None) -> int:
        """Adds to the open prompt of the request, which ``open_prompt`` begins: the content is its next piece, or takes
        the place of the pieces from number ``replace_from`` on. After ``commit``, the content is injected into the
        output, and an ``Injected`` is among the events. If the service refuses, nothing changes, and a ``FrameRefused``
        is among the events. Both have the number that this method returns: 1 for the first append of the request. Does
        nothing else if the request has ended. Raises InvalidOption."""
        append = build_append(content, replace_from)
        self._num_appends += 1
        append.append_id = self._num_appends
        self._begin()
        if self._carried is not None and not self._ended:
            self._carried.append(append)
        return append.append_id

    def commit(self) -> None:
        """Ends the open prompt: the output begins."""
        self._begin()
        if self._carried is not None and not self._ended:
            self._carried.commit()

    def leave(self) -> None:
        """Cancels the request, if it has not ended, and takes no more of its events. Safe to call twice."""
        if not self._ended:
            self._ended = True
            self._mailbox.abandoned = True
            self.cancel()

    def _begin(self) -> None:
        if self._carried is None and not self._ended:
            self._carried = CarriedRequest(
                self._start,
                self._mailbox,
                self._open_stream,
                num_targets=self._num_targets,
                on_move=self._on_move,
                older=self._older._carried if self._older is not None and not self._older._ended else None,  # noqa: SLF001
            )
            self._older = None
            if self._cancelled:
                self._carried.cancel()
            if self._start.HasField("timeout_ms"):
                self._expect_end_within(self._start.timeout_ms / 1000)

    def _amend(self, update: pb.GenerationUpdate) -> None:
        """Changes the start message, before it is sent."""
        if update.HasField("priority"):
            self._start.priority = update.priority
        if update.HasField("max_tokens"):
            self._start.sampling.max_tokens = update.max_tokens
        if update.HasField("timeout_ms"):
            self._start.timeout_ms = update.timeout_ms

    def _expect_end_within(self, seconds: float) -> None:
        """Limits the wait if the service does not respond at all; otherwise the service enforces the deadline."""
        self._give_up_at = asyncio.get_running_loop().time() + seconds + _DEADLINE_GRACE_SECONDS
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(self._give_up_at)

    async def _receive(self, *, rest: bool) -> list[Event]:
        if self._ended:
            return []
        self._begin()
        try:
            async with asyncio.timeout_at(self._give_up_at) as self._limit:
                events = await self._mailbox.take_event(rest=rest)
        except TimeoutError:
            self.leave()
            failure = RequestFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed without a response")
            failure.request_id = self.request_id
            raise failure from None
        except RequestFailed as failure:
            self._ended = True
            is_cancelled = self._cancelled and failure.code is grpc.StatusCode.CANCELLED
            if failure.finished is not None and (is_cancelled or failure.finished.superseded):
                return [failure.finished]
            raise
        finally:
            self._limit = None
        self._ended = isinstance(events[-1], Finished)
        return events


async def only_deltas(request: RequestStream) -> AsyncIterator[Delta]:
    """Yields the output of a request, which ends with the loop."""
    async with request:
        async for event in request:
            if isinstance(event, Delta):
                yield event

"""The upstream side of an HTTP request: one request on the service's stream, or one for each of its prompts."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple

import penstock.v1 as pb
from penstock.clients.errors import RequestFailed
from penstock.clients.events import Accepted, Event, Finished, merge
from penstock.clients.gateway.upstream.eagerly import run_eagerly
from penstock.clients.gateway.upstream.service_link import UpstreamCaller

_MAX_UNMERGED = 64
"""The limit of queued events per choice; more are merged, so that the output itself bounds the queue of a slow
caller."""

Arrival = tuple[int, Event]
"""An event, and the index of the request that it belongs to."""
Handler = Callable[[Sequence[Arrival]], Coroutine[Any, Any, None]]
QuickHandler = Callable[[int, Event], bool]
"""Handles an event without waiting; returns whether it did. If not, a ``Handler`` gets the event."""


class Abandoned(Exception):
    """Raised when the caller no longer waits for the answer."""


class UpstreamRequest:
    """Requests that succeed or fail together. An early end cancels all of them. ``close`` must always be called."""

    def __init__(self, caller: UpstreamCaller, starts: Sequence[pb.GenerationStart]) -> None:
        self._caller = caller
        self._starts = list(starts)
        self._num_requests = len(starts)
        self._cancels: dict[int, Callable[[], None]] = {}
        """The functions that cancel the requests that have not ended."""
        self._waiting: list[Arrival] = []
        self._num_merged = 0
        """How many events at the beginning are merged already."""
        self._max_unmerged = _MAX_UNMERGED * sum(max(1, start.sampling.n) for start in starts)
        self._failure: RequestFailed | Abandoned | None = None
        self._nudged = False
        self._news = asyncio.Event()
        self._has_come: Callable[[], bool] = _never
        """The awaited condition, before ``pass_on`` or without it."""
        self._passing: tuple[Handler, asyncio.Future[None]] | None = None
        """The handler from ``pass_on``, and the future that ``pass_on`` awaits."""
        self._handle_now: QuickHandler = _not_now
        self._is_handling = False
        self._handling: asyncio.Task[None] | None = None
        """The task of the last events, if their handler had to wait."""
        self._num_accepted = 0
        self.failed_index = 0
        """The index of the request that failed, if any."""
        self.request_id = ""
        """The service's id of the first request; empty until it is accepted."""
        self.resume_ticket = b""
        """What continues the request; empty until it is accepted, and if there are several requests."""

    def send_requests(self) -> None:
        """Sends the requests without keeping them: a prompt may be large, and its answer may take hours."""
        starts, self._starts = self._starts, []
        for index, start in enumerate(starts):
            receiver = _UpstreamReceiver(partial(self.arrive, index), partial(self.fail, index))
            self._cancels[index] = self._caller.carry(start, receiver)

    async def accepted(self) -> None:
        """Waits until the service has accepted all requests. Raises RequestFailed if it refuses one, and Abandoned."""
        await self._until(lambda: self._is_accepted or self._failure is not None)
        if self._failure is not None and not self._is_accepted:
            raise self._failure

    async def collect(self) -> list[Arrival]:
        """Waits for the last event and returns all. Raises RequestFailed and Abandoned."""
        await self._until(lambda: not self._cancels)
        if self._failure is not None:
            raise self._failure
        arrivals, self._waiting = self._waiting, []
        return arrivals

    async def pass_on(self, handle: Handler, handle_now: QuickHandler | None = None) -> None:
        """Passes events to ``handle`` as they arrive, in order, until the last one: one call at a time, with all events
        that arrived meanwhile. After a ``nudge`` there may be none. ``handle_now`` gets each event first, unless
        ``handle`` is running. Raises the exceptions of both, RequestFailed after the last event of requests that
        failed, and Abandoned."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._passing = handle, over
        self._handle_now = handle_now or _not_now
        self._notify()
        try:
            await over
        finally:
            self._passing = None
            if self._handling is not None:
                self._handling.cancel()

    def nudge(self) -> None:
        """Calls the handler of ``pass_on``."""
        self._nudged = True
        self._notify()

    def abandon(self) -> None:
        """Cancels the running requests after the caller has disconnected; pending calls raise Abandoned."""
        if self._cancels:
            self._failure = Abandoned()
            self.close()
            self._notify()

    def close(self) -> None:
        """Cancels the running requests. Safe to call twice."""
        for cancel in self._cancels.values():
            cancel()
            self._caller.done()
        self._cancels.clear()

    def arrive(self, index: int, event: Event) -> None:
        """Receives an event of one of the requests; never waits."""
        if index not in self._cancels or self._is_handled_now(index, event):
            return
        self._waiting.append((index, event))
        if isinstance(event, Accepted):
            self._num_accepted += 1
            if index == 0:
                self.request_id = event.request_id
                self.resume_ticket = event.resume_ticket if self._num_requests == 1 else b""
        elif isinstance(event, Finished):
            del self._cancels[index]
            self._caller.done()
        if len(self._waiting) - self._num_merged > self._max_unmerged:
            self._merge()
        self._notify()

    def fail(self, index: int, failure: RequestFailed) -> None:
        """Receives the failure of one request, which ends the others."""
        if index not in self._cancels:
            return
        del self._cancels[index]
        self._caller.done()
        failure.request_id = failure.request_id or self.request_id
        self._failure, self.failed_index = failure, index
        self.close()
        self._notify()

    @property
    def _is_accepted(self) -> bool:
        return self._num_accepted == self._num_requests

    async def _until(self, has_come: Callable[[], bool]) -> None:
        """Waits for a condition. Wakes only once, not for each token."""
        self._has_come = has_come
        try:
            while not has_come():
                self._news.clear()
                await self._news.wait()
        finally:
            self._has_come = _never  # the condition refers to this object: a reference cycle

    def _notify(self) -> None:
        """Handles new events directly: waking a task for each token costs more than sending it."""
        if self._passing is None:
            if self._has_come():
                self._news.set()
        elif not self._is_handling:
            self._handling = run_eagerly(self._hand_over(*self._passing))

    def _is_handled_now(self, index: int, event: Event) -> bool:
        """Offers an event to the quick handler of ``pass_on``, unless earlier events are still waiting or handled."""
        if self._passing is None or self._is_handling or self._waiting or (over := self._passing[1]).done():
            return False
        try:
            return self._handle_now(index, event)
        except Exception as error:  # see _hand_over
            over.set_exception(error)
            return True

    async def _hand_over(self, handle: Handler, over: asyncio.Future[None]) -> None:
        """Runs the handler. Its exceptions go to ``pass_on``: raised here, they would reach the shared stream."""
        self._is_handling = True
        try:
            while self._waiting or self._nudged:
                self._nudged = False
                arrivals, self._waiting, self._num_merged = self._waiting, [], 0
                await handle(arrivals)
            if self._failure is not None:
                raise self._failure
        except BaseException as error:
            if not over.done():
                over.set_exception(error)
        else:
            if not self._cancels and not over.done():
                over.set_result(None)
        finally:
            self._is_handling = False

    def _merge(self) -> None:
        """Merges the events since the last time; as a single event, the writer of the answer could not pause."""
        of: dict[int, list[Event]] = {}
        for index, event in self._waiting[self._num_merged :]:
            of.setdefault(index, []).append(event)
        self._waiting[self._num_merged :] = [(index, event) for index, events in of.items() for event in merge(events)]
        self._num_merged = len(self._waiting)


def _never() -> bool:
    """The condition while none is awaited."""
    return False


def _not_now(_: int, __: Event) -> bool:
    """The quick handler while there is none."""
    return False


class _UpstreamReceiver(NamedTuple):
    """Receives the events of one of the requests."""

    put: Callable[[Event], None]
    fail: Callable[[RequestFailed], None]

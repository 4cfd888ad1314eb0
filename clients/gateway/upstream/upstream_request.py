"""What one HTTP request asks of the service: one request on the stream, or one for each of its prompts."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from penstock.clients.errors import RequestFailed
from penstock.clients.events import Accepted, Event, Finished, merge
from penstock.clients.gateway.upstream.eagerly import run_eagerly
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.v1 import generation_pb2 as pb

_MAX_UNMERGED = 64
"""Events of each choice; more are merged, so that what waits for a slow caller is bounded by the output itself."""

Arrival = tuple[int, Event]
"""An event, and the index of the request among the exchange's that it belongs to."""
Handler = Callable[[Sequence[Arrival]], Coroutine[Any, Any, None]]


class Abandoned(Exception):
    """Nobody waits for the answer any more."""


class UpstreamRequest:
    """Requests that succeed or fail together. What ends it early cancels them all: ``close`` is always to be called."""

    def __init__(self, caller: UpstreamCaller, starts: Sequence[pb.Start]) -> None:
        self._caller = caller
        self._starts = list(starts)
        self._num_requests = len(starts)
        self._cancels: dict[int, Callable[[], None]] = {}
        """Of the requests that have not ended."""
        self._waiting: list[Arrival] = []
        self._num_merged = 0
        """The first of them, which were."""
        self._max_unmerged = _MAX_UNMERGED * sum(max(1, start.sampling.n) for start in starts)
        self._failure: RequestFailed | Abandoned | None = None
        self._nudged = False
        self._news = asyncio.Event()
        self._has_come: Callable[[], bool] = _never
        """What is waited for, before ``pass_on`` or without it."""
        self._passing: tuple[Handler, asyncio.Future[None]] | None = None
        """What was given to ``pass_on``, and the end that it waits for."""
        self._is_handling = False
        self._handling: asyncio.Task[None] | None = None
        """Of the last events, if their handler had to wait."""
        self._num_accepted = 0
        self.failed_index = 0
        """Which request failed, if one did."""
        self.request_id = ""
        """The service's id of the first request; empty until it is accepted."""

    def send_requests(self) -> None:
        """Sends the requests, and keeps none of them: a prompt may be large, and its answer take hours."""
        starts, self._starts = self._starts, []
        for index, start in enumerate(starts):
            self._cancels[index] = self._caller.carry(start, _UpstreamReceiver(self, index))

    async def accepted(self) -> None:
        """Returns when the service has taken all requests. Raises RequestFailed if it refuses one, and Abandoned."""
        await self._until(lambda: self._is_accepted or self._failure is not None)
        if self._failure is not None and not self._is_accepted:
            raise self._failure

    async def collect(self) -> list[Arrival]:
        """All events, when the last one has come. Raises RequestFailed, and Abandoned."""
        await self._until(lambda: not self._cancels)
        if self._failure is not None:
            raise self._failure
        arrivals, self._waiting = self._waiting, []
        return arrivals

    async def pass_on(self, handle: Handler) -> None:
        """Has ``handle`` take the events as they come, in order, until the last one: one call at a time, with all that
        came meanwhile. After a ``nudge`` there may be none. Raises what ``handle`` raises; RequestFailed after the last
        event of requests that failed; and Abandoned."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._passing = handle, over
        self._tell()
        try:
            await over
        finally:
            self._passing = None
            if self._handling is not None:
                self._handling.cancel()

    def keep_of_body(self, num_bytes: int) -> None:
        """Counts only ``num_bytes`` of the caller's body from now on: the part that the answer still needs."""
        self._caller.keep_of_body(num_bytes)

    def nudge(self) -> None:
        """Has what was given to ``pass_on`` called."""
        self._nudged = True
        self._tell()

    def abandon(self) -> None:
        """The caller is gone: cancels what has not ended, and raises Abandoned from whatever waits."""
        if self._cancels:
            self._failure = Abandoned()
            self.close()
            self._tell()

    def close(self) -> None:
        """Cancels what has not ended. Safe to call twice."""
        for cancel in self._cancels.values():
            cancel()
            self._caller.done()
        self._cancels.clear()

    def arrive(self, index: int, event: Event) -> None:
        """An event of one of the requests; never waits."""
        if index not in self._cancels:
            return
        self._waiting.append((index, event))
        if isinstance(event, Accepted):
            self._num_accepted += 1
            if index == 0:
                self.request_id = event.request_id
        elif isinstance(event, Finished):
            del self._cancels[index]
            self._caller.done()
        if len(self._waiting) - self._num_merged > self._max_unmerged:
            self._merge()
        self._tell()

    def fail(self, index: int, failure: RequestFailed) -> None:
        """One of the requests failed: the others end with it."""
        if index not in self._cancels:
            return
        del self._cancels[index]
        self._caller.done()
        failure.request_id = failure.request_id or self.request_id
        self._failure, self.failed_index = failure, index
        self.close()
        self._tell()

    @property
    def _is_accepted(self) -> bool:
        return self._num_accepted == self._num_requests

    async def _until(self, has_come: Callable[[], bool]) -> None:
        """Who waits is woken once, not by each token."""
        self._has_come = has_come
        try:
            while not has_come():
                self._news.clear()
                await self._news.wait()
        finally:
            self._has_come = _never  # what is waited for knows this exchange: a circle

    def _tell(self) -> None:
        """There is news. It is handled here and now, since each token is news: to wake a task for it costs more than to
        send it."""
        if self._passing is None:
            if self._has_come():
                self._news.set()
        elif not self._is_handling:
            self._handling = run_eagerly(self._hand_over(*self._passing))

    async def _hand_over(self, handle: Handler, over: asyncio.Future[None]) -> None:
        """Whatever is raised is for who waits in ``pass_on``: here it would meet the stream that others share."""
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
        """Of what came since the last time: were all of it one event, what writes the answer could not pause."""
        of: dict[int, list[Event]] = {}
        for index, event in self._waiting[self._num_merged :]:
            of.setdefault(index, []).append(event)
        self._waiting[self._num_merged :] = [(index, event) for index, events in of.items() for event in merge(events)]
        self._num_merged = len(self._waiting)


def _never() -> bool:
    """Stands for the awaited call while none is awaited."""
    return False


class _UpstreamReceiver:
    """The receiver of one of an exchange's requests."""

    def __init__(self, upstream_request: UpstreamRequest, index: int) -> None:
        self._upstream_request = upstream_request
        self._index = index

    def put(self, event: Event) -> None:
        """Passes it on."""
        self._upstream_request.arrive(self._index, event)

    def fail(self, failure: RequestFailed) -> None:
        """Passes it on."""
        self._upstream_request.fail(self._index, failure)

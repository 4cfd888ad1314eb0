"""What one HTTP request asks of the service: one request on the stream, or one for each of its prompts."""

import asyncio
from collections.abc import Callable, Sequence

from penstock.clients.errors import RequestFailed
from penstock.clients.events import Accepted, Event, Finished, merge
from penstock.clients.gateway.service_link import Caller
from penstock.v1 import generation_pb2 as pb

_MAX_UNMERGED = 64
"""Events of each choice; more are merged, so that what waits for a slow caller is bounded by the output itself."""

Arrival = tuple[int, Event]
"""An event, and the index of the request among the exchange's that it belongs to."""


class Abandoned(Exception):
    """Nobody waits for the answer any more."""


class Exchange:
    """Requests that succeed or fail together. What ends it early cancels them all: ``close`` is always to be called."""

    def __init__(self, caller: Caller, starts: Sequence[pb.Start]) -> None:
        self._caller = caller
        self._starts = starts
        self._cancels: dict[int, Callable[[], None]] = {}
        """Of the requests that have not ended."""
        self._waiting: list[Arrival] = []
        self._num_merged = 0
        """The first of them, which were."""
        self._max_unmerged = _MAX_UNMERGED * sum(max(1, start.sampling.n) for start in starts)
        self._failure: RequestFailed | Abandoned | None = None
        self._nudged = False
        self._news = asyncio.Event()
        self._wants_rest = False
        self._num_accepted = 0
        self.request_id = ""
        """The service's id of the first request; empty until it is accepted."""

    @property
    def is_done(self) -> bool:
        """Whether all has come and was taken."""
        return not self._cancels and not self._waiting and self._failure is None

    def begin(self) -> None:
        """Sends the requests."""
        for index, start in enumerate(self._starts):
            self._cancels[index] = self._caller.carry(start, _Place(self, index))

    async def accepted(self) -> None:
        """Returns when the service has taken all requests. Raises RequestFailed if it refuses one, and Abandoned."""
        while self._num_accepted < len(self._starts):
            if self._failure is not None:
                raise self._failure
            await self._wait()

    async def take(self, *, rest: bool = False) -> list[Arrival]:
        """The events that wait, in order; with ``rest`` all until the end, for which the caller is woken once. None
        after a ``nudge``, and when all was taken. Raises RequestFailed after the last event of requests that failed,
        and Abandoned."""
        self._wants_rest = rest
        while self._cancels and (rest or not (self._waiting or self._nudged)):
            await self._wait()
        if self._failure is not None and (rest or not self._waiting):
            raise self._failure
        self._nudged = False
        arrivals, self._waiting, self._num_merged = self._waiting, [], 0
        return arrivals

    def nudge(self) -> None:
        """Wakes who waits in ``take``."""
        self._nudged = True
        self._news.set()

    def abandon(self) -> None:
        """The caller is gone: cancels what has not ended, and raises Abandoned from whatever waits."""
        if self._cancels:
            self._failure = Abandoned()
            self.close()
            self._news.set()

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
        if not self._cancels or not self._wants_rest:
            self._news.set()

    def fail(self, index: int, failure: RequestFailed) -> None:
        """One of the requests failed: the others end with it."""
        if index not in self._cancels:
            return
        del self._cancels[index]
        self._caller.done()
        failure.request_id = failure.request_id or self.request_id
        self._failure = failure
        self.close()
        self._news.set()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _merge(self) -> None:
        """Of what came since the last time: were all of it one event, what writes the answer could not pause."""
        of: dict[int, list[Event]] = {}
        for index, event in self._waiting[self._num_merged :]:
            of.setdefault(index, []).append(event)
        self._waiting[self._num_merged :] = [(index, event) for index, events in of.items() for event in merge(events)]
        self._num_merged = len(self._waiting)


class _Place:
    """The receiver of one of an exchange's requests."""

    def __init__(self, exchange: Exchange, index: int) -> None:
        self._exchange = exchange
        self._index = index

    def put(self, event: Event) -> None:
        """Passes it on."""
        self._exchange.arrive(self._index, event)

    def fail(self, failure: RequestFailed) -> None:
        """Passes it on."""
        self._exchange.fail(self._index, failure)

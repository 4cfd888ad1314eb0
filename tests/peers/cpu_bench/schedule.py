"""Sends the requests of a set when they are due: all at once, at given times, or as conversations that grow.

Runners of all engines import this, so it uses only the standard library.
"""

import asyncio
import heapq
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from cpu_bench.wire import Ran, Work

UNKNOWN_ID = 300
"""Stands in the history for an output token whose id the engine did not report."""


class Arrival(NamedTuple):
    """A request that is due."""

    number: int
    """Its place in the set."""
    prompt: list[int]
    """With the history of its conversation."""
    num_output: int


class Schedule:
    """Knows which requests are due, and keeps what came back. Does not know any engine."""

    def __init__(self, work: Work, clock: Callable[[], float] = time.perf_counter) -> None:
        self._work = work
        self._clock = clock
        self.began = clock()
        self._events: list[list[tuple[float, int]]] = [[] for _ in work.requests]
        self._outputs: list[list[int]] = [[] for _ in work.requests]
        self._arrivals = [self.began] * len(work.requests)
        self._unfinished = set(range(len(work.requests)))
        starts = range(0, len(work.requests), work.turns)
        offsets = work.arrivals_s or [0.0] * len(starts)
        self._due = [(self.began + offset, number) for offset, number in zip(offsets, starts, strict=True)]
        heapq.heapify(self._due)

    @property
    def is_over(self) -> bool:
        """Whether every request has finished."""
        return not self._unfinished

    def take_due(self, limit: int | None = None) -> list[Arrival]:
        """Takes the requests that have arrived, in order of arrival; at most ``limit`` of them."""
        now = self._clock()
        taken: list[Arrival] = []
        while self._due and self._due[0][0] <= now and (limit is None or len(taken) < limit):
            at, number = heapq.heappop(self._due)
            self._arrivals[number] = at
            taken.append(Arrival(number, self._prompt(number), self._work.requests[number][1]))
        return taken

    def seconds_to_next(self) -> float | None:
        """Returns the seconds until a request is due, at least 0; None if none is known yet."""
        return max(0.0, self._due[0][0] - self._clock()) if self._due else None

    def sleep_to_next(self) -> None:
        """Waits until a request is due. Raises RuntimeError if none will be."""
        wait = self.seconds_to_next()
        if wait is None:
            raise RuntimeError("the engine has no requests left, and some have not finished")
        time.sleep(wait)

    def add_tokens(self, number: int, ids: Sequence[int], at: float | None = None) -> None:
        """Notes tokens of a request, which came now or ``at`` a time."""
        if ids:
            self._events[number].append((self._clock() if at is None else at, len(ids)))
            self._outputs[number] += ids

    def finish(self, number: int, at: float | None = None) -> None:
        """Notes the end of a request, now or ``at`` a time; the next turn of its conversation is due a pause later."""
        self._unfinished.discard(number)
        if (number + 1) % self._work.turns:
            ended = self._clock() if at is None else at
            heapq.heappush(self._due, (ended + self._work.pause_s, number + 1))

    def ran(self, extra: dict[str, float] | None = None) -> Ran:
        """Returns what came of the set, which ends now."""
        return Ran(self.began, self._clock(), self._events, {} if extra is None else extra, self._arrivals)

    def _prompt(self, number: int) -> list[int]:
        history: list[int] = []
        for earlier in range(number - number % self._work.turns, number):
            history += self._work.requests[earlier][0] + self._outputs[earlier]
        return history + self._work.requests[number][0]


AddTokens = Callable[[Sequence[int]], None]


async def send_all(work: Work, generate: Callable[[Arrival, AddTokens], Awaitable[None]]) -> Schedule:
    """Sends each request when it is due, without waiting for the others. ``generate`` runs a request to its end and
    calls its second argument with the ids of the output as they come. Its first exception ends the run."""
    schedule = Schedule(work)

    async def run_one(arrival: Arrival) -> None:
        await generate(arrival, lambda ids: schedule.add_tokens(arrival.number, ids))
        schedule.finish(arrival.number)

    running: set[asyncio.Task[None]] = set()
    try:
        while not schedule.is_over:
            running |= {asyncio.create_task(run_one(arrival)) for arrival in schedule.take_due()}
            wait = schedule.seconds_to_next()
            if running:
                done, running = await asyncio.wait(running, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            else:
                await asyncio.sleep(wait or 0.0)
    finally:
        for task in running:
            task.cancel()
    return schedule

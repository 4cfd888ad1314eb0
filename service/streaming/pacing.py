"""Wakes one task at the earliest of the requested times. Knows nothing about the work that is due then."""

import asyncio
import math

TURN_S = 0.01
"""The interval at which waiting tasks are woken together. Messages written in one turn of the event loop need fewer
system calls, which are the largest part of the cost of a message."""

AT_ONCE = -math.inf
NEVER = math.inf


class WriteTimer:
    """A timer by the event loop's clock, for one waiting task at a time. Not set at first. For the event loop's thread
    only."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due = NEVER
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_due(self) -> bool:
        return self._due <= self._loop.time()

    def set(self, due: float) -> None:
        """Makes the timer fire at ``due`` or earlier. The waiting task runs after the caller, never during the call,
        because the engine delivers a step's events without a pause between them."""
        if due < self._due:
            self._due = due
            if self._waiter is not None:
                self._arm()

    def reset(self, due: float) -> None:
        """Makes the timer fire at ``due``, regardless of earlier calls. No task may be waiting."""
        assert self._waiter is None
        self._due = due

    def ring(self) -> None:
        """Wakes the waiting task now, if any."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        self._waiter = self._loop.create_future()
        self._arm()
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._disarm()

    def _arm(self) -> None:
        self._disarm()
        if self._due == NEVER:
            return
        if self._due > self._loop.time():
            self._timer = self._loop.call_at(math.ceil(self._due / TURN_S) * TURN_S, self.ring)
        else:
            self.ring()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

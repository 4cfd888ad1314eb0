"""Wakes one task at the earliest of the times that others ask for. Knows nothing of what is due then."""

import asyncio
import math

TURN_S = 0.01
"""Tasks that wait are woken together, this far apart: gRPC sends what is written in one turn of the loop in fewer
system calls, and they cost more than all else about a message."""

AT_ONCE = -math.inf
NEVER = math.inf


class WriteTimer:
    """Set to a time by the loop's clock, at first to never; one task at a time may wait for it. All of it belongs to
    the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due = NEVER
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_due(self) -> bool:
        """Whether its time has come."""
        return self._due <= self._loop.time()

    def set(self, due: float) -> None:
        """It rings at ``due`` at the latest. Whoever waits runs after the caller, never amid it: the engine puts a
        step's events without a pause between them."""
        if due < self._due:
            self._due = due
            if self._waiter is not None:
                self._arm()

    def reset(self, due: float) -> None:
        """It rings at ``due``, whatever was asked for before. Nobody waits."""
        assert self._waiter is None
        self._due = due

    def ring(self) -> None:
        """Wakes whoever waits, now."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Until it rings."""
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

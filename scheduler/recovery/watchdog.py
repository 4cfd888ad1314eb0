"""Finds a step that does not end. It does not know plans or workers."""

import asyncio
from collections.abc import Callable

FACTOR = 10
"""A step may take this many times its predicted time."""
UNKNOWN_FACTOR = 20
"""While nothing is known of steps, the limit is this many times longer: the first step may be the largest of all."""
TICKS = 32
"""The number of ticks in a limit."""


class StepWatchdog:
    """Detects that the oldest step has taken too long.

    It counts its own ticks instead of reading a clock, so time in which this process itself did not run, because it was
    stopped or the machine slept, does not count.
    """

    def __init__(
        self, limit_s: float, predicted_s: Callable[[], float | None], on_expired: Callable[[float], None]
    ) -> None:
        """A step may always take ``limit_s``. ``predicted_s`` returns the oldest step's predicted time; None while
        nothing is known. ``on_expired`` is called with the limit that a step has exceeded."""
        self.num_unanswered = 0
        """Steps that were submitted and have no result."""
        self._limit_s = limit_s
        self._predicted_s = predicted_s
        self._on_expired = on_expired
        self._num_ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limit_s / TICKS, self._tick)

    def stop(self) -> None:
        """Stops watching. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()

    def submitted(self) -> None:
        self.num_unanswered += 1

    def answered(self) -> None:
        self.num_unanswered -= 1
        self._num_ticks = 0

    def restarted(self) -> None:
        """Discards all steps, which are lost."""
        self.num_unanswered = self._num_ticks = 0

    def _tick(self) -> None:
        self.start()
        if not self.num_unanswered:
            self._num_ticks = 0
            return
        self._num_ticks += 1
        predicted_s = self._predicted_s()
        if predicted_s is None:
            limit_s = UNKNOWN_FACTOR * self._limit_s
        else:
            limit_s = max(self._limit_s, FACTOR * predicted_s)
        if self._num_ticks > TICKS * limit_s / self._limit_s:
            self._num_ticks = 0
            self._on_expired(limit_s)

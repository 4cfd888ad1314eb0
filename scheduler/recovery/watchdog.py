"""Finds a step that does not end. Knows no plan and no worker."""

import asyncio
from collections.abc import Callable

FACTOR = 10
"""A step may take so many times what was predicted for it."""
UNKNOWN_FACTOR = 20
"""While nothing is known of steps the limit is so many times longer: the first may be the largest of all."""
TICKS = 32
"""In a limit."""


class StepWatchdog:
    """Says when the oldest step has gone on for too long.

    It counts turns of its own instead of reading a clock: time in which this process did not run itself, since it was
    stopped or the machine slept, is not held against the worker.
    """

    def __init__(
        self, limit_s: float, predicted_s: Callable[[], float | None], on_expired: Callable[[float], None]
    ) -> None:
        """A step may take ``limit_s`` in any case. ``predicted_s``: for the oldest step; None while nothing is known.
        ``on_expired`` is told the limit that a step was over."""
        self.num_unanswered = 0
        """Steps that were submitted and not answered."""
        self._limit_s = limit_s
        self._predicted_s = predicted_s
        self._on_expired = on_expired
        self._num_ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Watches from here on, until ``stop``."""
        self._timer = asyncio.get_running_loop().call_later(self._limit_s / TICKS, self._tick)

    def stop(self) -> None:
        """No more. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()

    def submitted(self) -> None:
        """One more step is on its way."""
        self.num_unanswered += 1

    def answered(self) -> None:
        """The oldest step is answered."""
        self.num_unanswered -= 1
        self._num_ticks = 0

    def restarted(self) -> None:
        """What was on its way is lost."""
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

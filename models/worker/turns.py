"""Turns for a thread that works beside steps which use all cores. If it took a core during a step, the threads on the
other cores would wait for that core's part."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TURN_S = 0.004
"""The length of a turn, between two steps."""
SHARE = 10
"""How many times as long as a turn steps are computed before the next one."""
QUIET_S = 0.02
"""The time without a step after which no turns are needed."""
LONGEST_S = 0.05
"""How long a step waits at most for the end of a turn."""


class Turns:
    """The turns of one thread, and the steps of another one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self.is_wanted = False
        """Whether there is work that needs turns while steps are computed."""
        self._ends_at: float | None = None
        """When the turn ends; None: there is none."""
        self._computed_s = 0.0
        """How long steps were computed since the last turn."""
        self._idle_since: float | None = -QUIET_S
        """None while a step is computed, or waits for the end of a turn."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Computes a step, after a turn if one is due."""
        with self._changed:
            self._idle_since = None
            if self.is_wanted and self._computed_s >= SHARE * TURN_S:
                began = self._clock()
                self._ends_at = began + TURN_S
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._ends_at is None, LONGEST_S)
                # If the last piece took longer than the turn, the next turn comes later.
                self._computed_s = SHARE * (TURN_S - (self._clock() - began))
        began = self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._idle_since = self._clock()
                self._computed_s += self._idle_since - began

    def wait(self) -> None:
        """Returns when the caller may do a piece of its work, which should take about a millisecond. Ends the turn if
        it is over. ``end`` must follow the last piece."""
        with self._changed:
            if self._ends_at is not None and self._clock() < self._ends_at:
                return
            self._ends_at, self.is_wanted = None, True
            self._changed.notify_all()
            while self._ends_at is None and not self._is_quiet():
                self._changed.wait(QUIET_S)

    def end(self) -> None:
        """Ends the work."""
        with self._changed:
            self._ends_at, self.is_wanted = None, False
            self._changed.notify_all()

    def _is_quiet(self) -> bool:
        return self._idle_since is not None and self._clock() - self._idle_since >= QUIET_S

"""Decides when to give up replacing workers, and how long to wait before the next one. Plain data; starts nothing."""

import time
from collections import Counter
from collections.abc import Callable
from enum import Enum

FIRST_DELAY_S = 0.5
LONG_LIFE_S = 60.0
"""A worker that lived this long counts as good, even if it had nothing to do."""


class WorkerFailure(Enum):
    """Why a worker is gone that did no work, or never started. The value is the number of such failures, without a step
    that has a result in between, after which no other worker is started."""

    BY_ITSELF = 5
    IN_A_STEP = 16
    """In its first step. A request in it may be the cause, and will be found: one among a thousand takes fewer fatal
    steps."""
    KILLED = 32
    """Ended by something else."""


class RestartBudget:
    """Counts failures since the last step that had a result."""

    def __init__(self, first_delay_s: float = FIRST_DELAY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        """Workers that replaced another."""
        self._first_delay_s = first_delay_s
        self._clock = clock
        self._started_at = clock()
        self._is_good = False
        """Whether the worker has returned a result."""
        self._failures: Counter[WorkerFailure] = Counter()

    def answered(self) -> None:
        self._is_good = True

    def died(self, failure: WorkerFailure) -> None:
        """Records that a started worker is gone. This is not a failure if it has done work."""
        if self._is_good or self._clock() - self._started_at > LONG_LIFE_S:
            self._failures.clear()
        else:
            self._failures[failure] += 1

    def failed(self, failure: WorkerFailure) -> None:
        """Records that a worker did not start."""
        self._failures[failure] += 1

    def succeeded(self) -> None:
        """Records that a replacement has started."""
        self.total += 1
        self._is_good = False
        self._started_at = self._clock()

    @property
    def is_hopeless(self) -> bool:
        """Whether another worker is expected to fail as well."""
        return any(count >= failure.value for failure, count in self._failures.items())

    @property
    def delay_s(self) -> float:
        """The delay before the next worker starts: none after a good one; doubled after each that failed by itself."""
        if self._failures[WorkerFailure.BY_ITSELF]:
            return self._first_delay_s * (1 << self._failures[WorkerFailure.BY_ITSELF] - 1)
        return self._first_delay_s if self._failures[WorkerFailure.KILLED] else 0.0

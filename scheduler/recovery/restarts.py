"""When to give up replacing workers, and how long to wait before the next one. Plain data; starts nothing."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum, auto

FIRST_DELAY_S = 0.5
LONG_LIFE_S = 60.0
"""A worker that lived for so long was a good one, though it had nothing to do."""


class WorkerFailure(Enum):
    """Why a worker is gone that did no work, or never came up."""

    BY_ITSELF = auto()
    IN_A_STEP = auto()
    """Its first one: what was in it may be why, and is found out."""
    KILLED = auto()
    """By somebody else."""


MAX_IN_A_ROW: Mapping[WorkerFailure, int] = {
    WorkerFailure.BY_ITSELF: 5,
    WorkerFailure.IN_A_STEP: 16,
    WorkerFailure.KILLED: 32,
}
"""Without a step that was answered. It takes fewer fatal steps to find one killer among a thousand requests."""


class RestartBudget:
    """Counts what went wrong since the last step that was answered."""

    def __init__(self, first_delay_s: float = FIRST_DELAY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        """Workers that replaced another."""
        self._first_delay_s = first_delay_s
        self._clock = clock
        self._started_at = clock()
        self._is_good = False
        """Whether the worker has answered a step."""
        self._failures: Counter[WorkerFailure] = Counter()

    def answered(self) -> None:
        """The worker has answered a step."""
        self._is_good = True

    def died(self, failure: WorkerFailure) -> None:
        """A worker that had started is gone. That it is replaced is no failure if it has done work."""
        if self._is_good or self._clock() - self._started_at > LONG_LIFE_S:
            self._failures.clear()
        else:
            self._failures[failure] += 1

    def failed(self, failure: WorkerFailure) -> None:
        """A worker did not start."""
        self._failures[failure] += 1

    def succeeded(self) -> None:
        """A worker has started in the place of another."""
        self.total += 1
        self._is_good = False
        self._started_at = self._clock()

    @property
    def is_hopeless(self) -> bool:
        """Whether the next one would only be one more."""
        return any(count >= MAX_IN_A_ROW[failure] for failure, count in self._failures.items())

    @property
    def delay_s(self) -> float:
        """Before the next worker is started: none after a good one; twice as long after each that failed by itself."""
        if self._failures[WorkerFailure.BY_ITSELF]:
            return self._first_delay_s * (1 << self._failures[WorkerFailure.BY_ITSELF] - 1)
        return self._first_delay_s if self._failures[WorkerFailure.KILLED] else 0.0

"""Measures how late the service's event loop runs callbacks that are due. Independent of the engine and of gRPC.

Streams, health checks and the worker's outputs share that loop: while one callback runs, the others wait.
"""

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

PERIOD_S = 0.02
MAX_SAMPLES = 1024
"""The samples of the last 20 s."""


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag over some samples, in seconds. Quantiles use the nearest rank."""

    p50_s: float
    p99_s: float
    max_s: float


class LoopLag:
    """Samples one loop with a timer: a sample is the time from when the timer was due to when its callback ran.

    A late callback also delays the samples that should have followed it. They are added when it runs, so that every
    period counts equally. Late by 50 ms:

        0    20    40    50     ms after it was due
        |-----|-----|----x      it runs
        50   30    10           the three samples, in ms
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds; uvloop's own clock has a resolution of 1 ms."""
        self._clock = clock
        self._samples: deque[float] = deque(maxlen=MAX_SAMPLES)
        self.num_samples = 0
        """The number of samples since the start, including those no longer kept."""
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = self._clock() + PERIOD_S
        self._timer = loop.call_later(PERIOD_S, self._sample, loop)

    def stop(self) -> None:
        """Stops sampling. Safe to call before ``start``, and twice."""
        if self._timer is not None:
            self._timer.cancel()

    def over(self, num_samples: int) -> Lag | None:
        """Returns the lag over the last ``num_samples``, or fewer if fewer are kept; None if there are none."""
        recent = sorted(itertools.islice(reversed(self._samples), max(0, num_samples)))
        return Lag(_quantile(recent, 0.5), _quantile(recent, 0.99), recent[-1]) if recent else None

    def _sample(self, loop: asyncio.AbstractEventLoop) -> None:
        # uvloop's timers have a resolution of 1 ms too, so one may run too early.
        late_s = max(0.0, self._clock() - self._due)
        # The longest ones are kept if there is no room for all.
        num_due = min(1 + int(late_s / PERIOD_S), MAX_SAMPLES)
        self._samples.extend(late_s - i * PERIOD_S for i in range(num_due))
        self.num_samples += num_due
        self.start(loop)


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[math.ceil(share * len(ordered)) - 1]

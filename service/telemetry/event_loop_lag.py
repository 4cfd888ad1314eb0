"""How late the service's event loop runs what is due. Knows neither the engine nor gRPC.

Streams, health checks and the worker's outputs take turns on that loop: while one callback runs, the others wait.
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
"""Those of the last 20 s."""


@dataclass(frozen=True, slots=True)
class Lag:
    """Over some samples, in seconds; quantiles are of the nearest rank."""

    p50_s: float
    p99_s: float
    max_s: float


class LoopLag:
    """Samples one loop by a timer: a sample is how much later than due its callback ran.

    While the callback waits no other becomes due, though whatever else came meanwhile waits as well. So the samples
    that are missing are made up for, and every stretch of time has its share of them. Late by 50 ms:

        0    20    40    50     ms after it was due
        |-----|-----|----x      it runs
        50   30    10           ms that each of three waited
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is in seconds; uvloop's own counts whole milliseconds."""
        self._clock = clock
        self._samples: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._num_samples = 0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """From here on, until ``stop``."""
        self._due = self._clock() + PERIOD_S
        self._timer = loop.call_later(PERIOD_S, self._sample, loop)

    def stop(self) -> None:
        """No more samples. Safe to call before ``start``, and twice."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def num_samples(self) -> int:
        """All since the start, those that are forgotten included."""
        return self._num_samples

    def over(self, num_samples: int) -> Lag | None:
        """Of the last so many, as far as they are not forgotten; None where there is none."""
        recent = sorted(itertools.islice(reversed(self._samples), max(0, num_samples)))
        return Lag(_quantile(recent, 0.5), _quantile(recent, 0.99), recent[-1]) if recent else None

    def _sample(self, loop: asyncio.AbstractEventLoop) -> None:
        # uvloop's timers count whole milliseconds as well, so one may run too early.
        late_s = max(0.0, self._clock() - self._due)
        # The longest come first, and are kept where there is no room for all.
        num_due = min(1 + int(late_s / PERIOD_S), MAX_SAMPLES)
        self._samples.extend(late_s - i * PERIOD_S for i in range(num_due))
        self._num_samples += num_due
        self.start(loop)


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[math.ceil(share * len(ordered)) - 1]

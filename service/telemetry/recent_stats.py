"""Throughput and latency of the last 10 and 60 seconds.

A timer begins a new second; until then, whatever is observed goes to the current one. Nothing is computed before it is
read, except one logarithm for each delta.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock.scheduler.engine_stats import Counters
from penstock.service.telemetry.histogram import LogHistogram
from penstock.service.telemetry.metrics import Metrics, RecentLatencies

MAX_SECONDS = 60
RATE_SECONDS = 10
"""The period of ``RequestRates``, in seconds."""


@dataclass(frozen=True, slots=True)
class RecentWindow:
    """What happened in a recent period."""

    seconds: float
    finished_requests: int
    prefill_tokens: int
    output_tokens: int
    first_token: LogHistogram
    inter_token: LogHistogram


@dataclass(frozen=True, slots=True)
class RequestRates:
    """The requests that ended recently, including refused ones, per second."""

    ended_per_s: float
    """At least the rate of one request: balancers ignore a rate of 0, which would keep an idle service idle."""
    failed_per_s: float
    """The requests that failed through the service's fault, or because it was overloaded."""


@dataclass(frozen=True, slots=True)
class _Second:
    """One second, or longer if the event loop was late. The totals are those at its beginning."""

    began: float
    finished_requests: int
    prefill_tokens: int
    output_tokens: int
    ended: int
    failed: int
    latencies: RecentLatencies


class RecentStats:
    """The last 60 seconds of a service."""

    def __init__(
        self, counters: Callable[[], Counters], metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``counters`` returns the engine's totals."""
        self._counters = counters
        self._metrics = metrics
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._seconds: deque[_Second] = deque(maxlen=MAX_SECONDS)
        """Oldest first; the last one is the current one."""
        self.begin_second()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins a second now, and then every second."""
        self.begin_second()
        self._timer = loop.call_later(1.0, self.start, loop)

    def stop(self) -> None:
        """Stops the timer. Safe to call before ``start``, and twice."""
        if self._timer is not None:
            self._timer.cancel()

    def begin_second(self) -> None:
        self._metrics.recent = RecentLatencies()
        self._seconds.append(self._now())

    def over(self, num_seconds: int) -> RecentWindow:
        """Returns the statistics of the last ``num_seconds`` seconds, of which the current one may have just begun; of
        fewer if there were not as many."""
        recent = list(itertools.islice(reversed(self._seconds), num_seconds))
        first, now = recent[-1], self._now()
        return RecentWindow(
            seconds=now.began - first.began,
            finished_requests=now.finished_requests - first.finished_requests,
            prefill_tokens=now.prefill_tokens - first.prefill_tokens,
            output_tokens=now.output_tokens - first.output_tokens,
            first_token=LogHistogram.sum(second.latencies.first_token for second in recent),
            inter_token=LogHistogram.sum(second.latencies.inter_token for second in recent),
        )

    def rates(self) -> RequestRates:
        """Returns the rates over the last ``RATE_SECONDS``, or since the start. Cheap enough to call for each call's
        end."""
        metrics, seconds = self._metrics, self._seconds
        first = seconds[max(0, len(seconds) - RATE_SECONDS)]
        passed_s = max(1.0, self._clock() - first.began)
        return RequestRates(
            ended_per_s=max(1, metrics.num_ended - first.ended) / passed_s,
            failed_per_s=(metrics.num_failed - first.failed) / passed_s,
        )

    def _now(self) -> _Second:
        counters, metrics = self._counters(), self._metrics
        return _Second(
            began=self._clock(),
            finished_requests=sum(metrics.finished.values()),
            prefill_tokens=counters.prefill_tokens,
            output_tokens=counters.output_tokens,
            ended=metrics.num_ended,
            failed=metrics.num_failed,
            latencies=metrics.recent,
        )

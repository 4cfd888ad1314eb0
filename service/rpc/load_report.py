"""Reports the service's load in ORCA's format (gRFC A51), for trailing metadata of calls and for balancers that watch
it. docs/load.md describes the fields."""

import time
from collections.abc import Callable
from contextvars import ContextVar

from penstock.scheduler.engine_stats import EngineLoad, EngineState
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.request import TokenUsage
from penstock.service.telemetry.recent_stats import RecentStats
from penstock.v1.orca import TRAILER, OrcaLoadReport

MAX_AGE_S = 0.02
"""How old a report may be. Most steps take longer, so there is at most one report per step, however many calls end."""
MIN_UTILIZATION = 0.01
"""The utilization of an idle service: readers ignore 0, and would keep the last value."""

Trailers = tuple[tuple[str, str | bytes], ...]


class CallCost:
    """The tokens of all requests of one call."""

    __slots__ = ("cached_tokens", "output_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0

    def add_usage(self, usage: TokenUsage) -> None:
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.output_tokens += usage.output_tokens

    def serialized(self) -> bytes:
        """Returns the part of a serialized OrcaLoadReport with the cost; empty if there is none."""
        if not (self.prompt_tokens or self.output_tokens):
            return b""
        raw: bytes = OrcaLoadReport(
            request_cost={
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "output_tokens": self.output_tokens,
            }
        ).SerializeToString()
        return raw


current_cost: ContextVar[CallCost] = ContextVar("current_cost")
"""The cost of this task's call."""


class LoadReporter:
    """Reports the load of an engine, and computes a report at most once in ``MAX_AGE_S``."""

    def __init__(
        self,
        engine: Engine,
        recent_stats: RecentStats,
        target_ttft_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``target_ttft_s``: the target time to the first token of a short request, if there is one."""
        self._engine = engine
        self._recent_stats = recent_stats
        self._target_ttft_s = target_ttft_s
        self._clock = clock
        self._raw = b""
        self._expires_at = clock()

    def report(self) -> bytes:
        """Returns the serialized report without a call's cost."""
        now = self._clock()
        if now >= self._expires_at:
            self._raw = self._compute()
            self._expires_at = now + MAX_AGE_S
        return self._raw

    def trailers(self, cost: CallCost | None = None) -> Trailers:
        """Returns the trailing metadata of a call with this cost."""
        # Concatenating the serialized parts of a message gives the serialized message.
        return ((TRAILER, self.report() if cost is None else self.report() + cost.serialized()),)

    def _compute(self) -> bytes:
        load, rates = self._engine.load(), self._recent_stats.rates()
        config, facts = self._engine.config, self._engine.facts
        shares = {
            "kv_cache_utilization": load.kv_usage,
            "batch_utilization": load.running / config.max_rows(facts),
            "queue_utilization": min(1.0, load.waiting / config.max_queued_requests),
        }
        metrics = shares | {
            "kv_cache_usage_perc": load.kv_usage,
            "num_requests_running": load.running,
            "num_requests_waiting": load.waiting,
        }
        if load.predicted_ttft_s is not None:
            metrics["predicted_ttft_seconds"] = load.predicted_ttft_s
        raw: bytes = OrcaLoadReport(
            application_utilization=self._utilization(load, max(shares.values())),
            rps_fractional=rates.ended_per_s,
            eps=rates.failed_per_s,
            named_metrics=metrics,
        ).SerializeToString()
        return raw

    def _utilization(self, load: EngineLoad, largest_share: float) -> float:
        utilization = largest_share
        if self._target_ttft_s is not None and load.predicted_ttft_s is not None:
            utilization = load.predicted_ttft_s / self._target_ttft_s
        if load.state is not EngineState.SERVING:
            utilization = max(1.0, utilization)  # it refuses new requests
        return max(MIN_UTILIZATION, utilization)

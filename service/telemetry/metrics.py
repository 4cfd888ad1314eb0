"""The metrics that the service counts itself: requests, deltas and calls. The engine's own counters are read from the
engine when metrics are read.

Counting happens on the event loop, thousands of times a second, so it uses plain additions and no library. Holds counts
and names; never a prompt, an output or a key.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from penstock.scheduler.request import RequestFinished
from penstock.service.auth.identity import ACCESS
from penstock.service.errors import ServiceError
from penstock.service.telemetry.buckets import FIRST_TOKEN_BOUNDS, OUTPUT_TOKEN_BOUNDS, REQUEST_BOUNDS, TOKEN_BOUNDS
from penstock.service.telemetry.histogram import Histogram, LogHistogram

MAX_TENANTS = 64
"""Tenants with a label of their own: the first ones seen. Every request may bring a new name."""
OTHER_TENANTS = "~other"
"""The common label of all other tenants; no tenant can have this name."""
_OTHER_METHODS = "other"

_SUCCESS = {"STOP": "stop", "LENGTH": "length", "CANCELLED": "abort", "SUPERSEDED": "abort", "DEADLINE": "abort"}
OUR_FAULTS = frozenset(
    {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
)
"""The status codes of failures that callers did not cause."""
_OVERLOAD = frozenset({"QUEUE_FULL", "OVERLOADED", "PREPARATION_FULL"})
"""The reasons of refusals that another replica may not give."""
FINISHED_REASONS = ("stop", "length", "abort", "error")
"""vLLM's words for why a request ended; ``error`` stands for every other reason."""


@dataclass(slots=True)
class TenantTotals:
    """Totals over a tenant's requests that ended."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class OperationTimes:
    """Histograms of one kind of request, such as chat."""

    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    output_token: Histogram = field(default_factory=lambda: Histogram(OUTPUT_TOKEN_BOUNDS))
    durations: dict[str, Histogram] = field(default_factory=dict)
    """Durations by the name of the status; the name is empty for OK."""


@dataclass(slots=True)
class RecentLatencies:
    """Latencies over a short time."""

    first_token: LogHistogram = field(default_factory=LogHistogram)
    """The time from arrival to the first delta."""
    inter_token: LogHistogram = field(default_factory=LogHistogram)
    """For each token of a delta, its share of the time since the delta before."""


class Metrics:
    """All counters of a service."""

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS)
        """From arrival to the first delta, for every request that has one."""
        self.inter_token = Histogram(OUTPUT_TOKEN_BOUNDS)
        self.duration = Histogram(REQUEST_BOUNDS)
        self.queue_time = Histogram(REQUEST_BOUNDS)
        self.prefill_time = Histogram(REQUEST_BOUNDS)
        self.decode_time = Histogram(REQUEST_BOUNDS)
        self.inference_time = Histogram(REQUEST_BOUNDS)
        self.output_token = Histogram(OUTPUT_TOKEN_BOUNDS)
        """Mean of a request, from its second token on."""
        self.prompt_tokens = Histogram(TOKEN_BOUNDS)
        self.output_tokens = Histogram(TOKEN_BOUNDS)
        self.read_kv_batches: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns the numbers of KV event batches, in total and not published."""
        self.operations: dict[str, OperationTimes] = {}
        self.ends: Counter[tuple[str, str]] = Counter()
        """Ended requests by the names of status and reason."""
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISHED_REASONS, 0))
        self.calls: Counter[tuple[str, str]] = Counter()
        """Ended calls by method and the name of the status."""
        self.num_ended = 0
        """All requests that ended, including refused ones."""
        self.num_failed = 0
        """The requests among them that failed through the service's fault, or because it was overloaded."""
        self.tenants: dict[str, TenantTotals] = {}
        self.recent = RecentLatencies()
        """Latencies of this second. ``recent_stats.py`` puts a new object here each second."""

    def request(self, arrival: float) -> "RequestMeter":
        """Returns the meter of a request that arrived at ``arrival``, in ``time.monotonic()``."""
        return RequestMeter(self, arrival)

    def call(self, method: str, code: grpc.StatusCode) -> None:
        """Counts a call that ended. ``method`` is gRPC's full name."""
        self.calls[method.removeprefix("/") if method in ACCESS else _OTHER_METHODS, code.name] += 1

    def tenant_label(self, tenant: str) -> str:
        """Returns the tenant's own label, which it keeps, or the common one if there are too many tenants."""
        if tenant not in self.tenants:
            if len(self.tenants) >= MAX_TENANTS:
                return OTHER_TENANTS
            self.tenants[tenant] = TenantTotals()
        return tenant

    def ended(self, end: "End") -> None:
        finished, code = end.finished, end.code.name
        self.ends[code, end.reason] += 1
        self.num_ended += 1
        self.num_failed += end.code in OUR_FAULTS or end.reason in _OVERLOAD
        usage = finished.usage
        totals = self.tenants.setdefault(self.tenant_label(end.tenant), TenantTotals())
        totals.requests += 1
        times = self.operations.setdefault(end.operation, OperationTimes())
        is_ok = end.code is grpc.StatusCode.OK
        durations = times.durations.setdefault("" if is_ok else code, Histogram(REQUEST_BOUNDS))
        durations.observe(finished.timings.total_us * 1e-6)
        if not end.was_accepted:
            return
        totals.prompt_tokens += usage.prompt_tokens
        totals.cached_tokens += usage.cached_tokens
        totals.output_tokens += usage.output_tokens
        self.finished[_SUCCESS.get(finished.reason.name, "error")] += 1
        self.prompt_tokens.observe(usage.prompt_tokens)
        self.output_tokens.observe(usage.output_tokens)
        self._time(finished, times if is_ok else None)

    def _time(self, finished: RequestFinished, successes: OperationTimes | None) -> None:
        timings = finished.timings
        total_s, queued_s, first_s = timings.total_us * 1e-6, timings.queued_us * 1e-6, timings.first_token_us * 1e-6
        self.duration.observe(total_s)
        if successes is None and not first_s:
            return  # it failed before its first token
        self.queue_time.observe(queued_s)
        self.inference_time.observe(total_s - queued_s)
        if not first_s:
            return  # it has no output
        self.prefill_time.observe(timings.prefill_us * 1e-6)
        self.decode_time.observe(total_s - first_s)
        if successes is not None:
            successes.first_token.observe(first_s)
        if finished.usage.output_tokens > 1:
            mean_s = (total_s - first_s) / (finished.usage.output_tokens - 1)
            self.output_token.observe(mean_s)
            if successes is not None:
                successes.output_token.observe(mean_s)


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended, for metrics, span and log."""

    request_id: str
    client_request_id: str
    tenant: str
    operation: str
    """chat, text_completion or embeddings, the names in OpenTelemetry's conventions; or classification or score."""
    finished: RequestFinished
    refusal: ServiceError | None
    """The error, if the engine did not end it. Its message may repeat a caller's value, so it is never reported."""
    code: grpc.StatusCode
    was_accepted: bool
    """Whether it entered the queue."""
    session_id: str = ""

    @property
    def reason(self) -> str:
        """The name of the error's reason, or of the engine's finish reason."""
        return self.finished.reason.name if self.refusal is None else self.refusal.reason.name


class RequestMeter:
    """Times the deltas of one request."""

    __slots__ = ("_arrival", "_last_at", "_metrics")

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._last_at: dict[int, float] = {}
        """Time of the last delta by choice."""

    def delta(self, choice: int, num_tokens: int) -> None:
        """Counts a delta of the choice. It may have no tokens if it only ends the choice."""
        now = time.monotonic()
        last_at = self._last_at.get(choice)
        if last_at is not None:
            passed_s = now - last_at
            self._metrics.inter_token.observe(passed_s)
            if num_tokens:
                self._metrics.recent.inter_token.observe(passed_s / num_tokens, num_tokens)
        elif not self._last_at:
            passed_s = now - self._arrival
            self._metrics.first_token.observe(passed_s)
            self._metrics.recent.first_token.observe(passed_s)
        self._last_at[choice] = now

"""What the service counts by itself, for metrics: requests as they end, deltas as they come, calls. What the engine
counts already is read from there, when somebody asks.

All of it happens on the event loop, thousands of times a second: plain additions, and no library. Knows neither
Prometheus nor OpenTelemetry. Holds counts and names; never a prompt, an output or a key.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

import grpc

from penstock.scheduler.request import RequestFinished
from penstock.service.auth.identity import ACCESS
from penstock.service.errors import ServiceError
from penstock.service.telemetry.catalog import FIRST_TOKEN_BOUNDS, OUTPUT_TOKEN_BOUNDS, REQUEST_BOUNDS, TOKEN_BOUNDS
from penstock.service.telemetry.histogram import Histogram

MAX_TENANTS = 64
"""That have a label of their own: the first ones seen. A name may come with every request."""
OTHER_TENANTS = "~other"
"""The label of all others together; no tenant can have this name."""
_OTHER_METHODS = "other"

_SUCCESS = {"STOP": "stop", "LENGTH": "length", "CANCELLED": "abort", "DEADLINE": "abort"}
FINISHED_REASONS = ("stop", "length", "abort", "error")
"""As vLLM says why a request ended; ``error`` is every other reason."""


@dataclass(slots=True)
class TenantTotals:
    """Of a tenant's requests that ended."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class OperationTimes:
    """Of one kind of request, such as chat."""

    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    output_token: Histogram = field(default_factory=lambda: Histogram(OUTPUT_TOKEN_BOUNDS))
    durations: dict[str, Histogram] = field(default_factory=dict)
    """By the name of the status; empty where that is OK."""


class Metrics:
    """The register; one for a service."""

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS)
        """From arrival to the first delta, of every request that has one."""
        self.inter_token = Histogram(OUTPUT_TOKEN_BOUNDS)
        self.duration = Histogram(REQUEST_BOUNDS)
        self.queue_time = Histogram(REQUEST_BOUNDS)
        self.prefill_time = Histogram(REQUEST_BOUNDS)
        self.decode_time = Histogram(REQUEST_BOUNDS)
        self.inference_time = Histogram(REQUEST_BOUNDS)
        self.output_token = Histogram(OUTPUT_TOKEN_BOUNDS)
        """The mean of a request, from its second token on."""
        self.prompt_tokens = Histogram(TOKEN_BOUNDS)
        self.output_tokens = Histogram(TOKEN_BOUNDS)
        self.operations: dict[str, OperationTimes] = {}
        self.ends: Counter[tuple[str, str]] = Counter()
        """By the names of status and reason."""
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISHED_REASONS, 0))
        self.calls: Counter[tuple[str, str]] = Counter()
        """By method and the name of the status."""
        self.tenants: dict[str, TenantTotals] = {}

    def request(self, arrival: float) -> "RequestMeter":
        """The meter of one request, which came at ``arrival`` by ``time.monotonic()``."""
        return RequestMeter(self, arrival)

    def call(self, method: str, code: grpc.StatusCode) -> None:
        """A call ended. ``method``: as gRPC has it."""
        self.calls[method.removeprefix("/") if method in ACCESS else _OTHER_METHODS, code.name] += 1

    def tenant_label(self, tenant: str) -> str:
        """The tenant's own, which is its for good, or that of all for whom there is no room."""
        if tenant not in self.tenants:
            if len(self.tenants) >= MAX_TENANTS:
                return OTHER_TENANTS
            self.tenants[tenant] = TenantTotals()
        return tenant

    def ended(self, end: "End") -> None:
        """A request ended, for whatever reason."""
        finished, code = end.finished, end.code.name
        self.ends[code, end.reason] += 1
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
            return  # it never ran, or not for long enough
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
    """How a request ended, for whoever tells of it."""

    request_id: str
    client_request_id: str
    tenant: str
    operation: str
    """chat, text_completion or embeddings, as OpenTelemetry's conventions name it."""
    finished: RequestFinished
    refusal: ServiceError | None
    """Why, where it was not the engine that ended it. Its message may repeat a value, so nobody tells that."""
    code: grpc.StatusCode
    was_accepted: bool
    """Whether it entered the queue."""

    @property
    def reason(self) -> str:
        """The name of the catalogue's reason, or of a ``FinishReason``."""
        return self.finished.reason.name if self.refusal is None else self.refusal.reason.name


class RequestMeter:
    """Times the deltas of one request."""

    __slots__ = ("_arrival", "_last_at", "_metrics")

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._last_at: dict[int, float] = {}
        """By choice."""

    def delta(self, choice: int) -> None:
        """A delta of the choice came."""
        now = time.monotonic()
        last_at = self._last_at.get(choice)
        if last_at is not None:
            self._metrics.inter_token.observe(now - last_at)
        elif not self._last_at:
            self._metrics.first_token.observe(now - self._arrival)
        self._last_at[choice] = now

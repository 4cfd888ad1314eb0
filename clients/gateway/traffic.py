"""Counts the gateway's requests and connections for ``/metrics``, and limits connections.

Only HTTP; the service has its own metrics.
"""

import time
from collections.abc import Iterator, Sized
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from starlette.types import Scope

CALLER = "caller"
"""Key in a request's state for its caller, once known."""
HELD_UNTIL_END = "penstock.held"
"""Key in a request's scope. Its value, an ``ExitStack``, is closed when the request has ended in any way."""
GONE = 499
"""nginx's status for a caller that disconnected; only for metrics and logs."""
_NO_ROUTE = "other"
_BOUNDS_S = tuple(0.01 * 2**i for i in range(17))
"""Bucket bounds, from 10 ms (probes) to 655 s (long answers)."""


class RequestRecord:
    """The counted properties of one request."""

    status = GONE
    """The response's status, once it has begun."""


class GatewayMetrics:
    """Requests and connections. For the event loop's thread."""

    def __init__(self) -> None:
        # They would add half as many series, and the service has none.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        """The registry of all metrics."""
        self._connections: Sized = ()
        self._max_connections: float = float("inf")
        self._requests = Counter(
            "penstock_gateway_requests", "Requests that ended.", ("route", "code"), registry=registry
        )
        self._durations = Histogram(
            "penstock_gateway_request_duration_seconds",
            "From a request's head to the end of its answer.",
            ("route",),
            registry=registry,
            buckets=_BOUNDS_S,
        )
        self._live = Gauge("penstock_gateway_live_requests", "Requests that have not ended.", registry=registry)
        connections = Gauge("penstock_gateway_connections", "Those that are open, idle ones too.", registry=registry)
        connections.set_function(lambda: len(self._connections))
        self.has_service_metrics = Gauge(
            "penstock_gateway_has_service_metrics", "1 if the page has the service's metrics too.", registry=registry
        )

    def bound(self, connections: Sized, most: int) -> None:
        """Sets the live collection of open connections and their limit ``most``."""
        self._connections = connections
        self._max_connections = most

    @property
    def is_full(self) -> bool:
        """Whether there are too many connections."""
        return len(self._connections) > self._max_connections

    @contextmanager
    def request(self, scope: Scope) -> Iterator[RequestRecord]:
        """Counts a request for the duration of the block."""
        record, began = RequestRecord(), time.monotonic()
        with self._live.track_inprogress():
            try:
                yield record
            finally:
                # A template, so that callers cannot create new series; a request that was refused early has none.
                route = getattr(scope.get("route"), "path", _NO_ROUTE)
                self._requests.labels(route, str(record.status)).inc()
                self._durations.labels(route).observe(time.monotonic() - began)

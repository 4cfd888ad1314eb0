"""Counts the gateway's requests and connections for ``/metrics``, and limits connections.

Covers only HTTP; the service has its own metrics.
"""

import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from starlette.types import Scope

CALLER = "caller"
"""The key in a request's state for its caller, once known."""
HELD_UNTIL_END = "penstock.held"
"""The key in a request's scope. Its value, an ``ExitStack``, is closed when the request has ended in any way."""
GONE = 499
"""nginx's status for a caller that disconnected; only for metrics and logs."""
_BOUNDS_S = tuple(0.01 * 2**i for i in range(17))
"""Bucket bounds, from 10 ms (probes) to 655 s (long answers)."""


class RequestRecord:
    """The counted properties of one request."""

    status = GONE
    """The response's status; GONE until the response has begun."""
    request_id = ""
    """The response's ``x-request-id``; empty until the response has begun."""


class GatewayMetrics:
    """The metrics of requests and connections. Use it only on the event loop's thread."""

    def __init__(self) -> None:
        # They would add half as many series again, and the service's metrics do not have them either.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self._connections: Sized = ()
        self._max_connections: float = float("inf")
        self._requests = Counter(
            "penstock_gateway_requests", "Requests that ended, including probes.", ("route", "code"), registry=registry
        )
        self._durations = Histogram(
            "penstock_gateway_request_duration_seconds",
            "Time from the head of a request to the end of its response.",
            ("route",),
            registry=registry,
            buckets=_BOUNDS_S,
        )
        self._live = Gauge(
            "penstock_gateway_live_requests",
            "Requests that have not ended, including the one for this page.",
            registry=registry,
        )
        self.moves = Counter(
            "penstock_gateway_moves",
            "How often a request continued at another target because its own had died.",
            registry=registry,
        )
        connections = Gauge("penstock_gateway_connections", "Open connections, including idle ones.", registry=registry)
        connections.set_function(lambda: len(self._connections))
        self.has_service_metrics = Gauge(
            "penstock_gateway_has_service_metrics",
            "1 if the page also has the service's metrics, else 0.",
            registry=registry,
        )

    def show(self, name: str, meaning: str, read: Callable[[], int]) -> None:
        """Adds a number that is read for each scrape."""
        Gauge(name, meaning, registry=self.registry).set_function(read)

    def bound(self, connections: Sized, most: int) -> None:
        """Sets the collection of open connections, which is read for each scrape, and the limit ``most`` on them."""
        self._connections = connections
        self._max_connections = most

    @property
    def is_full(self) -> bool:
        return len(self._connections) > self._max_connections

    @contextmanager
    def request(self, scope: Scope) -> Iterator[RequestRecord]:
        """Counts a request for the duration of the block."""
        record, began = RequestRecord(), time.monotonic()
        with self._live.track_inprogress():
            try:
                yield record
            finally:
                # The route's template, so that callers cannot create new series; a request refused early has no route.
                route = getattr(scope.get("route"), "path", "other")
                self._requests.labels(route, str(record.status)).inc()
                self._durations.labels(route).observe(time.monotonic() - began)

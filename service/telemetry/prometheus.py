"""The metrics listener: ``GET /metrics`` for Prometheus, in its text format or in OpenMetrics, and the probes
``/livez`` and ``/readyz``.

Threads serve it. Only reading the values runs on the event loop, for about 1 ms; rendering them takes longer, and does
not delay streams. The listener opens before the model is loaded.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, NamedTuple
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.clients.host.allowed_hosts import AllowedHosts
from penstock.service.config.addresses import LIVE_PATH, METRICS_PATH, READY_PATH, Address, ListenError
from penstock.service.telemetry.catalog import INSTRUMENTS
from penstock.service.telemetry.collector import Reading
from penstock.service.telemetry.histogram import Distribution
from penstock.service.telemetry.instrument import Instrument, MetricKind

MAX_CONNECTIONS = 16
"""Each has a thread. One more closes the connection that has sent no complete request head for the longest time; if
there is none, the oldest, if that is ``SCRAPE_S`` old; else the new one."""
SCRAPE_S = 1.0
"""Enough time for a scrape."""
IDLE_S = 10.0
"""How long a scraper may send nothing in the middle of its request."""
REQUEST_S = 30.0
"""Longest life of a connection: a few clients that send a byte now and then would otherwise take all places."""


_WRONG_METHOD, _ALLOW = "405 Method Not Allowed", ("Allow", "GET, HEAD, OPTIONS")
_OK, _PLAIN, _OPENMETRICS = "200 OK", "text/plain; charset=utf-8", "application/openmetrics-text"
_UNAVAILABLE = "503 Service Unavailable"
_PATHS = (METRICS_PATH, LIVE_PATH, READY_PATH)


class Readiness(NamedTuple):
    """Whether the service accepts requests, and the state that it is in."""

    is_ready: bool
    state: str


class MetricsPage:
    """The listener and its thread."""

    def __init__(
        self,
        address: Address,
        hosts: AllowedHosts,
        read: Callable[[], list[Reading]],
        readiness: Callable[[], Readiness],
    ) -> None:
        """Starts to listen. ``hosts``: the host names that requests may use. ``read`` and ``readiness`` are called by
        threads, and raise TimeoutError if the event loop does not respond. Raises ListenError."""
        registry = CollectorRegistry()
        registry.register(_Bridge(read))
        ProcessCollector(registry=registry)
        try:
            self._server = _Server(address, _app(registry, hosts, readiness))
        except OSError as error:
            raise ListenError(f"{address.flag} {address}: {error.strerror}; choose another") from None
        self.target = address.with_port(self._server.server_port)
        """The address with the port that was bound."""
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def stop(self) -> None:
        """Stops listening, without waiting for running requests."""

        def end() -> None:
            self._server.shutdown()
            self._server.server_close()

        self._server.socket.shutdown(socket.SHUT_RDWR)  # accepts no more connections, and wakes its thread
        threading.Thread(target=end, name="metrics end", daemon=True).start()


def to_families(readings: Iterable[Reading]) -> Iterator[Metric]:
    """Yields the metrics in the types of the Prometheus library."""
    for reading in readings:
        family = _family(reading.instrument)
        for labels, value in reading.points:
            if isinstance(family, HistogramMetricFamily):
                assert isinstance(value, Distribution)
                family.add_metric(labels, _cumulative(value), value.sum)
            else:
                family.add_metric(labels, value)
        yield family


class _Bridge(Collector):
    """Converts readings to the library's families, for each scrape."""

    def __init__(self, read: Callable[[], list[Reading]]) -> None:
        self._read = read

    def describe(self) -> Iterator[Metric]:
        """Returns all metrics without values, so that a scrape may select some by name."""
        return map(_family, INSTRUMENTS)

    def collect(self) -> Iterator[Metric]:
        """Returns all metrics. Raises TimeoutError if the event loop does not respond."""
        return to_families(self._read())


def _family(instrument: Instrument) -> Any:
    make = {
        MetricKind.COUNTER: CounterMetricFamily,
        MetricKind.GAUGE: GaugeMetricFamily,
        MetricKind.HISTOGRAM: HistogramMetricFamily,
    }
    labels = [label.replace(".", "_") for label in instrument.labels]
    return make[instrument.kind](instrument.prometheus_name, instrument.meaning, labels=labels)


def _cumulative(distribution: Distribution) -> list[tuple[str, float]]:
    buckets, total = [], 0
    for bound, count in zip((*distribution.bounds, float("inf")), distribution.counts, strict=True):
        total += count
        buckets.append((floatToGoString(bound), float(total)))  # type: ignore[no-untyped-call]
    return buckets


_NOT_OURS = b"the header Host is not a name of this server; use its address, or start it with --allowed-hosts\n"
App = Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]


def _app(registry: CollectorRegistry, hosts: AllowedHosts, readiness: Callable[[], Readiness]) -> App:
    """Returns the WSGI application. The library's own would rename metrics with a colon in OpenMetrics."""

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method, path, form = environ["REQUEST_METHOD"], environ["PATH_INFO"], _PLAIN
        if not hosts.allows(environ.get("HTTP_HOST", "localhost")):
            status, text = "421 Misdirected Request", _NOT_OURS
        elif path not in _PATHS:
            status, text = "404 Not Found", f"there is only: {', '.join(_PATHS)}\n".encode()
        elif method == "OPTIONS":
            start_response("204 No Content", [_ALLOW])
            return []
        elif method not in ("GET", "HEAD"):
            status, text = _WRONG_METHOD, f"{path} can only be read, with GET\n".encode()
        elif path == METRICS_PATH:
            status, form, text = _answer(registry, environ)
        else:
            status, text = _probe(path, readiness)
        allow = [_ALLOW] if status == _WRONG_METHOD else []
        start_response(status, [("Content-Type", form), ("Content-Length", str(len(text))), *allow])
        return [] if method == "HEAD" else [text]

    return app


def _answer(registry: CollectorRegistry, environ: WSGIEnvironment) -> tuple[str, str, bytes]:
    """Returns status, content type and body of the metrics."""
    names = parse_qs(environ.get("QUERY_STRING", "")).get("name[]")
    wanted: Any = registry.restricted_registry(names) if names else registry
    try:
        if _OPENMETRICS in environ.get("HTTP_ACCEPT", ""):
            form = f"{_OPENMETRICS}; version=1.0.0; charset=utf-8"
            page = openmetrics.generate_latest(wanted, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            return _OK, form, page
        return _OK, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(wanted)
    except TimeoutError:
        return _UNAVAILABLE, _PLAIN, b"the service is too busy to report its metrics; try again\n"


def _probe(path: str, readiness: Callable[[], Readiness]) -> tuple[str, bytes]:
    """Returns status and body of a probe. The body names the state."""
    try:
        found = readiness()
    except TimeoutError:
        return _UNAVAILABLE, b"the event loop does not respond\n"
    is_good = path == LIVE_PATH or found.is_ready
    return _OK if is_good else _UNAVAILABLE, f"{found.state}\n".encode()


class _Handler(WSGIRequestHandler):
    timeout = IDLE_S

    def setup(self) -> None:
        """Starts the timer that limits the connection's life."""
        super().setup()
        self._limit = threading.Timer(REQUEST_S, self._end)
        self._limit.daemon = True
        self._limit.start()

    def parse_request(self) -> bool:
        """Reads the request's head. After it, the connection is closed for others only once it is ``SCRAPE_S`` old."""
        is_whole = super().parse_request()
        self.server.keep(self.connection)  # type: ignore[attr-defined]
        return is_whole

    def finish(self) -> None:
        self._limit.cancel()
        super().finish()

    def _end(self) -> None:
        with suppress(OSError):  # it has just ended
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: scrapes are routine."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: Address, app: App) -> None:
        self.address_family, where = address.resolve()
        self._counting = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        """Connections, oldest first, and the time of each."""
        self._waiting: set[socket.socket] = set()
        """The open connections that have not sent a complete request head."""
        super().__init__(where[:2], _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        """Binds without looking up the host's full name, which may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[0], self.server_address[1]  # type: ignore[assignment]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handles a connection in a thread, or closes it if there are too many."""
        with self._counting:
            has_place = len(self._open) < MAX_CONNECTIONS or self._cut_one()
            if has_place:
                self._open[request] = time.monotonic()
                self._waiting.add(request)
        if has_place:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def keep(self, connection: socket.socket) -> None:
        """Notes that the head of a request has arrived."""
        with self._counting:
            self._waiting.discard(connection)

    def _cut_one(self) -> bool:
        latest = time.monotonic() - SCRAPE_S
        victim = next((each for each in self._open if each in self._waiting), None) or next(
            (each for each, since in self._open.items() if since <= latest), None
        )
        if victim is None:
            return False
        self._forget(victim)
        with suppress(OSError):  # it has just ended
            victim.shutdown(socket.SHUT_RDWR)  # wakes its thread
        return True

    def _forget(self, connection: socket.socket) -> None:
        self._open.pop(connection, None)
        self._waiting.discard(connection)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._counting:
                self._forget(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs nothing: a scraper may disconnect."""

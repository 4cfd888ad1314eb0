"""Sends metrics to a collector by OTLP if OpenTelemetry's environment variables name one, as for spans.

A thread waits, reads the values through the event loop and sends them, so a slow collector does not delay requests.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from penstock.clients.host.span_exporter import CLOSE_S
from penstock.service.telemetry.collector import Point, Reading
from penstock.service.telemetry.histogram import Distribution
from penstock.service.telemetry.instrument import MetricKind

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric, MetricExporter, MetricsData
    from opentelemetry.sdk.resources import Resource

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
_DEFAULT_INTERVAL_MS = 60_000
_MIN_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


class MetricsPush:
    """A thread that sends all metrics periodically. Counts are totals since the start, whatever temporality the
    environment prefers."""

    def __init__(
        self, exporter: "MetricExporter", resource: "Resource", interval_s: float, read: Callable[[], list[Reading]]
    ) -> None:
        self._exporter = exporter
        self._resource = resource
        self._interval_s = interval_s
        self._read = read
        self._began_ns = time.time_ns()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="metrics to a collector", daemon=True)
        self._thread.start()

    def stop(self, last: list[Reading]) -> None:
        """Sends ``last``, if the collector takes it at once. Safe to call before ``start``, and twice."""
        if self._thread is None or self._is_over.is_set():
            return
        self._is_over.set()
        options = {"timeout_millis": CLOSE_S * 1000}
        thread = threading.Thread(target=self._send, args=(last,), kwargs=options, name="last metrics", daemon=True)
        thread.start()
        thread.join(CLOSE_S)
        # Also ends an export that waits to be tried again, which may otherwise take as long as its timeout.
        try:
            self._exporter.shutdown(timeout_millis=0)
        except Exception as error:
            _warn(error)

    def _run(self) -> None:
        while not self._is_over.wait(self._interval_s):
            try:
                readings = self._read()
            except TimeoutError:
                continue
            except Exception as error:
                _warn(error)
                continue
            self._send(readings)

    def _send(self, readings: list[Reading], **options: float) -> None:
        """Sends metrics. An error is only logged, so that later ones are still sent."""
        try:
            self._exporter.export(self._data(readings), **options)
        except Exception as error:
            _warn(error)

    def _data(self, readings: Sequence[Reading]) -> "MetricsData":
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        metrics = to_otlp(readings, self._began_ns, time.time_ns())
        scope = ScopeMetrics(InstrumentationScope("penstock"), metrics, schema_url="")
        return MetricsData([ResourceMetrics(self._resource, [scope], schema_url="")])


def _warn(error: Exception) -> None:
    """Logs an error without its text: gRPC's may contain OTEL_EXPORTER_OTLP_HEADERS, which may hold keys."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{frame.name} {frame.filename.rpartition('/')[2]}:{frame.lineno}"
    _log.error("metrics could not be sent (%s in %s); the next ones are tried", type(error).__name__, place)


def push_from(environ: Mapping[str, str], read: Callable[[], list[Reading]]) -> MetricsPush | None:
    """Returns the push that the environment configures; None if it names no collector. Call it after the worker has
    started: it opens a channel."""
    wanted = any(environ.get(name) for name in _ENDPOINTS) and environ.get("OTEL_METRICS_EXPORTER") != "none"
    if not wanted:
        return None
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.resources import Resource

    resource = Resource.create({"service.name": environ.get("OTEL_SERVICE_NAME", "penstock")})
    try:
        interval_ms = float(environ.get("OTEL_METRIC_EXPORT_INTERVAL") or _DEFAULT_INTERVAL_MS)
    except ValueError:
        interval_ms = _DEFAULT_INTERVAL_MS
    return MetricsPush(OTLPMetricExporter(), resource, max(_MIN_INTERVAL_S, interval_ms / 1000), read)


def to_otlp(readings: Sequence[Reading], began_ns: int, now_ns: int) -> "list[Metric]":
    """Returns the metrics in OpenTelemetry's types, with Unix times; those only for Prometheus are left out."""
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Histogram, Metric, Sum

    found = []
    for reading in readings:
        instrument = reading.instrument
        if instrument.is_prometheus_only or not reading.points:
            continue
        total = AggregationTemporality.CUMULATIVE
        points = [_point(instrument.labels, point, began_ns, now_ns) for point in reading.points]
        data: Gauge | Histogram | Sum
        if instrument.kind is MetricKind.HISTOGRAM:
            data = Histogram(points, total)
        elif instrument.kind is MetricKind.COUNTER:
            data = Sum(points, total, is_monotonic=True)
        else:
            data = Gauge(points)
        found.append(Metric(instrument.name, instrument.meaning, instrument.unit, data))
    return found


def _point(names: tuple[str, ...], point: Point, began_ns: int, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint, NumberDataPoint

    value = point.value
    labels = {name: label for name, label in zip(names, point.labels, strict=True) if label}
    if not isinstance(value, Distribution):
        return NumberDataPoint(labels, began_ns, now_ns, value)
    # Minimum and maximum are optional in the protocol, but not in the library's type.
    unknown = cast(float, None)
    return HistogramDataPoint(
        labels, began_ns, now_ns, value.count, value.sum, value.counts, value.bounds, unknown, unknown
    )

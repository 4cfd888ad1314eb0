"""The cost of metrics to the service: of a delta, of a request's end, of a scrape and of a load report.

Two libraries' counters are timed for a delta too."""

import asyncio
import time
import timeit
from collections.abc import Callable

import grpc
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, Histogram as PrometheusHistogram
from prometheus_client.exposition import generate_latest

from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.request import EngineFinishReason, RequestFinished, RequestTimings, TokenUsage
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.rpc.load_report import MAX_AGE_S, CallCost, LoadReporter
from penstock.service.telemetry.buckets import OUTPUT_TOKEN_BOUNDS
from penstock.service.telemetry.collector import MetricsReader
from penstock.service.telemetry.event_loop_lag import LoopLag
from penstock.service.telemetry.metrics import MAX_TENANTS, End, Metrics
from penstock.service.telemetry.prometheus import to_families
from penstock.service.telemetry.recent_stats import RecentStats

DELTAS_PER_S = 6400
"""64 streams, 100 steps a second."""


def microseconds(work: Callable[[], object], number: int) -> float:
    """The fastest of five runs, each."""
    return min(timeit.repeat(work, number=number, repeat=5)) / number * 1e6


def end_of(tenant: str) -> End:
    """A request that ended as it should."""
    finished = RequestFinished(
        EngineFinishReason.STOP, TokenUsage(300, 16, 80), RequestTimings(1200, 40_000, 41_200, 900_000)
    )
    return End(
        request_id="id",
        client_request_id="",
        tenant=tenant,
        operation="chat",
        finished=finished,
        refusal=None,
        code=grpc.StatusCode.OK,
        was_accepted=True,
    )


def in_libraries() -> tuple[float, float]:
    """One observation by the client of Prometheus, and by OpenTelemetry's SDK."""
    histogram = PrometheusHistogram("x", "x", ["a", "b"], registry=CollectorRegistry(), buckets=OUTPUT_TOKEN_BOUNDS)
    child = histogram.labels("model", "0")
    meter = MeterProvider([InMemoryMetricReader()]).get_meter("x")
    instrument = meter.create_histogram("x", explicit_bucket_boundaries_advisory=OUTPUT_TOKEN_BOUNDS)
    labels = {"a": "model", "b": "0"}
    return (
        microseconds(lambda: child.observe(0.012), 50_000),
        microseconds(lambda: instrument.record(0.012, labels), 10_000),
    )


async def main() -> None:
    """Prints the costs."""
    metrics = Metrics()
    meter = metrics.request(time.monotonic())
    meter.delta(0, 1)
    delta_us = microseconds(lambda: meter.delta(0, 1), 200_000)
    prometheus_us, otel_us = in_libraries()
    print(f"a delta: {delta_us:.2f} us; {DELTAS_PER_S:,} a second: {delta_us * DELTAS_PER_S / 1e4:.2f} % of a core")
    print(f"  one observation by prometheus_client {prometheus_us:.2f} us, by OpenTelemetry's SDK {otel_us:.2f} us")
    end = end_of("default")
    print(f"a request's end: {microseconds(lambda: metrics.ended(end), 20_000):.1f} us")

    for number in range(MAX_TENANTS):
        metrics.ended(end_of(f"tenant-{number}"))
    engine = Engine(FakeExecutor(vocab_size=258, next_token=lambda history, sampling: 97))
    facts = await engine.start()
    reader = MetricsReader(engine, facts, metrics, LoopLag(), "demo")
    readings = reader.read()

    class Page:
        """What a registry is to the library."""

        def collect(self) -> object:
            """The metrics of one reading."""
            return to_families(readings)

    page: object = Page()
    read_us = microseconds(reader.read, 200)
    render_us = microseconds(lambda: generate_latest(page), 20)  # type: ignore[arg-type]
    size = len(generate_latest(page))  # type: ignore[arg-type]
    print(f"a scrape with {MAX_TENANTS} tenants: {read_us / 1000:.2f} ms of the event loop, ", end="")
    print(f"{render_us / 1000:.1f} ms of a thread, {size / 1024:.0f} KiB")
    cost = CallCost()
    cost.add_usage(TokenUsage(300, 16, 80))
    recent = RecentStats(lambda: engine.counters, metrics)
    reporter = LoadReporter(engine, recent)
    call_us = microseconds(reporter.trailers, 20_000)
    request_us = microseconds(lambda: reporter.trailers(cost), 20_000)
    load_us = microseconds(lambda: LoadReporter(engine, recent).report(), 2_000)
    print(f"a load report in a call's trailers: {call_us:.1f} us; with the cost of a request {request_us:.1f} us")
    share = load_us / MAX_AGE_S / 1e4
    print(f"  computed at most every {MAX_AGE_S * 1000:.0f} ms, in {load_us:.0f} us: {share:.2f} % of a core")
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(main())

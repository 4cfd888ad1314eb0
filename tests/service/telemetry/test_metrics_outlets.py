"""Metrics sent to a collector, a real gRPC server here: what it gets, how often, and what it cannot hold up."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as otlp, metrics_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from opentelemetry.sdk.resources import Resource
from waiting import until

import penstock.v1 as pb
from penstock.service.telemetry.collector import from_threads
from penstock.service.telemetry.otlp import MetricsPush, push_from

CUMULATIVE = metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE


class Collector(otlp_grpc.MetricsServiceServicer):
    """Keeps what it is sent."""

    def __init__(self):
        self.exports = []

    def Export(self, request, context):
        self.exports.append(request)
        return otlp.ExportMetricsServiceResponse()

    @property
    def last(self):
        (resource,) = self.exports[-1].resource_metrics
        (scope,) = resource.scope_metrics
        return resource, {metric.name: metric for metric in scope.metrics}


@pytest.fixture
def collector(monkeypatch):
    """Where the environment says that telemetry goes."""
    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    collector = Collector()
    otlp_grpc.add_MetricsServiceServicer_to_server(collector, server)
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1000")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "model-server")
    yield collector
    server.stop(None).wait()


async def complete(service):
    start = pb.GenerationStart(text="hi", sampling=pb.SamplingParams(max_tokens=4))
    await service.generation.Complete(pb.CompleteRequest(start=start))


async def test_a_collector_gets_all_but_vllms_names(start_service, collector):
    service = await start_service()
    await complete(service)
    await service.server.stop()
    resource, metrics = collector.last
    names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert names["service.name"] == "model-server"
    assert not [name for name in metrics if ":" in name]

    tokens = metrics["penstock.output_tokens"]
    assert (tokens.unit, tokens.sum.is_monotonic, tokens.sum.aggregation_temporality) == ("{token}", True, CUMULATIVE)
    [point] = tokens.sum.data_points
    assert point.as_int == 4
    assert 0 < point.start_time_unix_nano <= point.time_unix_nano

    [usage] = metrics["penstock.kv.usage"].gauge.data_points
    assert usage.as_double == 0.0
    [duration] = metrics["gen_ai.server.request.duration"].histogram.data_points
    labels = {attribute.key: attribute.value.string_value for attribute in duration.attributes}
    assert labels == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": "bytes",
    }
    assert duration.count == sum(duration.bucket_counts) == 1
    assert list(duration.explicit_bounds)[:3] == [0.01, 0.02, 0.04]
    assert duration.sum > 0
    assert not duration.HasField("min")
    [gaps] = metrics["penstock.inter_token_latency"].histogram.data_points
    assert gaps.count == 3


async def test_metrics_are_exported_repeatedly(start_service, collector):
    service = await start_service()
    async with asyncio.timeout(120):
        while not collector.exports:  # noqa: ASYNC110 - the collector's thread tells nobody
            await asyncio.sleep(0.01)
    assert service.engine.stats().requests == 0


async def test_a_collector_that_is_not_there_holds_nothing_up(start_service, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    shut_down, shutdown = threading.Event(), OTLPMetricExporter.shutdown

    def note_shutdown(exporter, timeout_millis=0.0, **options):
        shutdown(exporter, timeout_millis, **options)
        shut_down.set()

    monkeypatch.setattr(OTLPMetricExporter, "shutdown", note_shutdown)
    service = await start_service()
    await complete(service)
    await service.server.stop()
    # The library would try again for half a minute.
    assert shut_down.is_set()
    await until(lambda: not [thread for thread in threading.enumerate() if "metrics" in thread.name])


async def test_what_fails_once_ends_nothing_and_its_text_is_not_logged(caplog):
    """Errors of gRPC may hold the headers that it was to send."""
    done = threading.Event()
    failures = ["of reading"]

    def read():
        if failures:
            raise RuntimeError(f"hush, {failures.pop()}")
        return []

    class Exporter(MetricExporter):
        num_exports = 0

        def export(self, metrics_data, timeout_millis=0.0, **kwargs):
            self.num_exports += 1
            if self.num_exports == 1:
                raise ValueError("hush")
            done.set()
            return MetricExportResult.SUCCESS

        def force_flush(self, timeout_millis=0.0):
            return True

        def shutdown(self, timeout_millis=0.0, **kwargs):
            """Nothing is open."""

    push = MetricsPush(Exporter(), Resource({}), 0.01, from_threads(read))
    push.start()
    assert await asyncio.to_thread(done.wait, 30)
    push.stop([])
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(" in ")[0] for text in told] == [
        "metrics could not be sent (RuntimeError",
        "metrics could not be sent (ValueError",
    ]
    assert "hush" not in caplog.text


async def test_the_environment_decides():
    assert push_from({}, list) is None
    assert push_from({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, list) is None
    collector = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert push_from({**collector, "OTEL_METRICS_EXPORTER": "none"}, list) is None
    assert push_from({**collector, "OTEL_METRIC_EXPORT_INTERVAL": "often"}, list) is not None

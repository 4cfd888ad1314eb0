"""Sends a process's spans to a collector by OTLP, if OpenTelemetry's environment variables name one."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
CLOSE_S = 0.3
"""How long sending the last spans may take."""

_log = logging.getLogger(__name__)


def export_spans(environ: Mapping[str, str], service_name: str) -> Callable[[], None]:
    """Sends the process's spans to a collector, if the environment names one. ``environ`` holds OpenTelemetry's own
    variables; ``service_name`` is the name unless they set one. Call it after the process has started its children: it
    opens a channel. Returns a function that sends the remaining spans, for ``CLOSE_S`` at most, so that the process
    ends without delay."""
    if not any(environ.get(name) for name in _ENDPOINTS) or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return lambda: None
    shutdown = _install_exporter(environ.get("OTEL_SERVICE_NAME", service_name))

    def close() -> None:
        thread = threading.Thread(target=shutdown, name="last spans", daemon=True)
        thread.start()
        thread.join(CLOSE_S)

    return close


def _install_exporter(service_name: str) -> Callable[[], None]:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

    class QuietExporter(OTLPSpanExporter):
        """Logs an error without its text: gRPC's may contain OTEL_EXPORTER_OTLP_HEADERS, which may hold keys."""

        def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
            try:
                return super().export(spans)
            except Exception as error:
                _log.error("spans could not be sent (%s); the next ones are tried", type(error).__name__)
                return SpanExportResult.FAILURE

    provider = TracerProvider(shutdown_on_exit=False, resource=Resource.create({"service.name": service_name}))
    provider.add_span_processor(BatchSpanProcessor(QuietExporter()))
    trace.set_tracer_provider(provider)
    return provider.shutdown

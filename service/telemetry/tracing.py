"""Spans of calls and requests, by OpenTelemetry's conventions for RPC and generative AI servers.

Without a configured exporter, the API's null tracer does nothing. A span holds counts, names and the request id; never
a prompt, an output or a key.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import grpc
from opentelemetry import context as otel_context, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.scheduler.request import RequestFinished
from penstock.service.errors import code_of
from penstock.service.telemetry.metrics import Metrics

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
CLOSE_S = 0.3
"""How long sending the last spans may take."""
_PROPAGATOR = TraceContextTextMapPropagator()


class Telemetry:
    """Opens spans through the process's tracer provider. ``metrics`` count the same calls and requests."""

    def __init__(self, model_name: str, metrics: Metrics) -> None:
        self.metrics = metrics
        self._tracer = trace.get_tracer("penstock")
        self._model_name = model_name

    @contextmanager
    def call(self, method: str, metadata: Sequence[tuple[str, str | bytes]], request_id: str) -> Iterator[None]:
        """Opens the server span of one RPC, a child of the caller's span. It is the current span inside the block."""
        service, _, name = method.removeprefix("/").rpartition("/")
        carrier = {key: value for key, value in metadata if key == "traceparent" and isinstance(value, str)}
        with self._tracer.start_as_current_span(
            method.removeprefix("/"),
            context=_PROPAGATOR.extract(carrier) if carrier else None,
            kind=SpanKind.SERVER,
            attributes={
                "rpc.system": "grpc",
                "rpc.service": service,
                "rpc.method": name,
                "penstock.request_id": request_id,
            },
            record_exception=False,  # an exception's text may contain data that a span must not
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            except BaseException as error:
                _end_call(span, code_of(error))
                raise
            _end_call(span, grpc.StatusCode.OK)

    def request(self, request_id: str, tenant: str, operation: str, traceparent: str) -> Span:
        """Opens the span of one request; ``operation`` is ``chat`` or ``text_completion``. ``end_request`` ends it."""
        parent = _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else otel_context.get_current()
        return self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=parent,
            kind=SpanKind.INTERNAL,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "penstock",
                "gen_ai.request.model": self._model_name,
                "penstock.request_id": request_id,
                "penstock.tenant": tenant,
            },
        )


def _end_call(span: Span, code: grpc.StatusCode) -> None:
    number: int = code.value[0]
    span.set_attribute("rpc.grpc.status_code", number)
    if code in _OUR_FAULTS:
        span.set_status(Status(StatusCode.ERROR, code.name))


def end_request(span: Span, finished: RequestFinished, ended: str, code: grpc.StatusCode) -> None:
    """Records how a request ended and what it used, and ends its span. ``ended``: the name of the reason."""
    if span.is_recording():
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": finished.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": finished.usage.output_tokens,
                "gen_ai.response.finish_reasons": [ended.lower()],
                "penstock.cached_tokens": finished.usage.cached_tokens,
                "penstock.preemptions": finished.timings.preemptions,
                "penstock.time_to_first_token_s": finished.timings.first_token_us / 1e6,
            }
        )
        if finished.speculation is not None:
            span.set_attribute("penstock.drafted_tokens", finished.speculation.drafted)
            span.set_attribute("penstock.accepted_tokens", finished.speculation.accepted)
        _end_call(span, code)
    span.end()


_OUR_FAULTS = frozenset(
    {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
)


class Exporter:
    """Sends the process's spans to a collector, if the environment names one."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """``environ`` holds OpenTelemetry's own variables. Create it after the worker has started: it opens a
        channel."""
        wanted = any(environ.get(name) for name in _ENDPOINTS)
        self._shutdown = _install_exporter(environ.get("OTEL_SERVICE_NAME", "penstock")) if wanted else _nothing

    def close(self) -> None:
        """Sends the remaining spans, for ``CLOSE_S`` at most, so that the process ends without delay."""
        thread = threading.Thread(target=self._shutdown, name="last spans", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


def _install_exporter(service_name: str) -> Callable[[], None]:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(shutdown_on_exit=False, resource=Resource.create({"service.name": service_name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider.shutdown


def _nothing() -> None:
    pass

"""Spans of calls and requests, by OpenTelemetry's conventions for RPC and generative AI servers.

Without a configured exporter, the API's null tracer does nothing. A span holds counts, names and ids; never a prompt,
an output or a key.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import grpc
from opentelemetry import context as otel_context, trace
from opentelemetry.trace import INVALID_SPAN, Link, NoOpTracer, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.scheduler.request import RequestFinished
from penstock.scheduler.timeline import Timeline
from penstock.service.errors import code_of
from penstock.service.telemetry.metrics import OUR_FAULTS, Metrics
from penstock.service.telemetry.phases import moments_of, phases_of

_PROPAGATOR = TraceContextTextMapPropagator()
_SHARED_STREAM = "penstock.v1.GenerationService/Generate"
"""The method whose calls carry many requests."""


@dataclass(frozen=True, slots=True)
class _CurrentCall:
    """The call of this task."""

    attributes: Mapping[str, str]
    traceparent: str
    """The trace context in its metadata; empty if there is none."""
    is_shared: bool
    """Whether it may carry many requests."""


_NO_CALL = _CurrentCall({}, "", is_shared=False)

_current_call: ContextVar[_CurrentCall] = ContextVar("_current_call")


class Telemetry:
    """Opens spans through the process's tracer provider. ``metrics`` count the same calls and requests."""

    def __init__(self, model_name: str, metrics: Metrics) -> None:
        self.metrics = metrics
        self._tracer = trace.get_tracer("penstock")
        self._model_name = model_name

    @contextmanager
    def call(self, method: str, metadata: Sequence[tuple[str, str | bytes]], request_id: str) -> Iterator[None]:
        """Opens the server span of one RPC, a child of the caller's span. It is the current span inside the block."""
        name = method.removeprefix("/")
        service, _, method_name = name.rpartition("/")
        carrier = {key: value for key, value in metadata if key == "traceparent" and isinstance(value, str)}
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method_name}
        _current_call.set(_CurrentCall(attributes, carrier.get("traceparent", ""), name == _SHARED_STREAM))
        with self._tracer.start_as_current_span(
            name,
            context=_PROPAGATOR.extract(carrier) if carrier else None,
            kind=SpanKind.SERVER,
            attributes={**attributes, "penstock.request_id": request_id},
            record_exception=False,  # an exception's text may contain data that a span must not
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            except BaseException as error:
                _end_call(span, code_of(error))
                raise
            _end_call(span, grpc.StatusCode.OK)

    def request(
        self, request_id: str, tenant: str, operation: str, traceparent: str, session_id: str = ""
    ) -> "RequestSpan":
        """Opens the span of one request; ``operation`` is as in ``metrics.End``.

        It is a child of ``traceparent`` if the request names one, and otherwise of its call's span. A request that
        shares its stream with others is in no trace of the stream's: the stream's span may last for days, and each
        request is sampled separately. If the parent is not the call's span, the request's span takes the place of an
        RPC's span and has a link to the call's."""
        call = _current_call.get(_NO_CALL)
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "penstock",
            "gen_ai.request.model": self._model_name,
            "penstock.request_id": request_id,
            "penstock.tenant": tenant,
        }
        if session_id:
            attributes["gen_ai.conversation.id"] = session_id
        parent, kind = otel_context.get_current(), SpanKind.INTERNAL
        links: list[Link] = []
        if traceparent != call.traceparent if traceparent else call.is_shared and not call.traceparent:
            of_call = trace.get_current_span().get_span_context()
            links = [Link(of_call)] if of_call.is_valid else []
            parent, kind = _PROPAGATOR.extract({"traceparent": traceparent}, otel_context.Context()), SpanKind.SERVER
            attributes |= call.attributes
        began_ns = time.time_ns()
        span = self._tracer.start_span(f"{operation} {self._model_name}", parent, kind, attributes, links, began_ns)
        return RequestSpan(span, self._tracer, began_ns)


class RequestSpan:
    """The span of one request, with a child span for each phase of the request."""

    def __init__(self, span: Span, tracer: Tracer, began_ns: int) -> None:
        """``began_ns`` is the span's beginning in Unix time."""
        self._span = span
        self._tracer = tracer
        self._began_ns = began_ns
        self._began = time.monotonic()
        self.timeline: Timeline | None = None
        """Its phases become child spans when the span ends."""

    @property
    def is_recording(self) -> bool:
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:
        """The trace's id; empty if there is no trace."""
        context = self._span.get_span_context()
        return trace.format_trace_id(context.trace_id) if context.is_valid else ""

    def end_request(self, finished: RequestFinished, ended: str, code: grpc.StatusCode) -> None:
        """Records how the request ended and what it used, and ends the span. ``ended`` is the name of the reason."""
        span = self._span
        if not span.is_recording():
            return
        now = time.monotonic()
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": finished.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": finished.usage.output_tokens,
                "gen_ai.response.finish_reasons": [ended.lower()],
                "penstock.cached_tokens": finished.usage.cached_tokens,
                "penstock.preemptions": finished.timings.preemptions,
                "penstock.worker_restarts": finished.timings.restarts,
                "penstock.time_to_first_token_s": finished.timings.first_token_us / 1e6,
            }
        )
        if finished.speculation is not None:
            span.set_attribute("penstock.drafted_tokens", finished.speculation.drafted)
            span.set_attribute("penstock.accepted_tokens", finished.speculation.accepted)
        if self.timeline is not None:
            self._add_phases(self.timeline, now)
        _end_call(span, code)
        span.end(self._unix_ns(now))

    def _add_phases(self, timeline: Timeline, now: float) -> None:
        for moment in moments_of(timeline):
            self._span.add_event(moment.name, moment.attributes, self._unix_ns(moment.at))
        parent = trace.set_span_in_context(self._span, otel_context.Context())
        for phase in phases_of(timeline, now):
            begin_ns, attributes = self._unix_ns(phase.begin), phase.attributes
            child = self._tracer.start_span(phase.name.value, parent, attributes=attributes, start_time=begin_ns)
            child.end(self._unix_ns(phase.end))

    def _unix_ns(self, at: float) -> int:
        """Converts a time of the timeline. The offset is that of the span's beginning, so that no change of the
        system's time puts a phase outside the span."""
        return self._began_ns + max(0, round((at - self._began) * 1e9))


NO_SPAN = RequestSpan(INVALID_SPAN, NoOpTracer(), 0)
"""The span of a request that was refused before it got one."""


def _end_call(span: Span, code: grpc.StatusCode) -> None:
    number: int = code.value[0]
    span.set_attribute("rpc.grpc.status_code", number)
    if code in OUR_FAULTS:
        span.set_attribute("error.type", code.name)
        span.set_status(Status(StatusCode.ERROR, code.name))

"""The gateway's spans, one for each HTTP request, by OpenTelemetry's conventions for HTTP servers.

Without a configured exporter, the API's null tracer passes the caller's trace context on and does nothing else. A span
holds no body, query or header.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.clients.gateway.traffic import GONE, RequestRecord

_PROPAGATOR = TraceContextTextMapPropagator()
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_TRACEPARENT = "traceparent"


class GatewayTracer:
    """Opens the spans of HTTP requests through the process's tracer provider."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("penstock.gateway")

    @contextmanager
    def request(self, scope: Scope, method: str, record: RequestRecord) -> Iterator[None]:
        """Opens the span of a request, a child of its caller's span. It is the current span inside the block."""
        known = method if method in _METHODS else "_OTHER"
        with self._tracer.start_as_current_span(
            known,
            context=_context_of(Headers(scope=scope)),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": known,
                "network.protocol.version": scope["http_version"],
                "url.scheme": scope["scheme"],
            },
            record_exception=False,  # an exception's text may contain data that a span must not
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            except Exception as error:
                _set_error(span, type(error).__name__)
                raise
            finally:
                if span.is_recording():
                    _describe(span, known, scope, record)


def _context_of(headers: Headers) -> Context:
    """Returns the caller's trace context; an empty one if the header is missing, repeated or invalid, as the standard
    requires."""
    carrier = {"tracestate": ",".join(headers.getlist("tracestate"))}
    if len(headers.getlist(_TRACEPARENT)) == 1:
        carrier[_TRACEPARENT] = headers[_TRACEPARENT]
    return _PROPAGATOR.extract(carrier, Context())


def _describe(span: Span, method: str, scope: Scope, record: RequestRecord) -> None:
    """Sets what is known only at the request's end. The path is left out if no route has it: it could be anything that
    the caller wrote."""
    route = getattr(scope.get("route"), "path", None)
    if route is not None:
        span.update_name(f"{method} {route}")
        span.set_attributes({"http.route": route, "url.path": scope["path"]})
    if record.status != GONE:
        span.set_attributes({"http.response.status_code": record.status, "penstock.request_id": record.request_id})
    if record.status >= 500:
        _set_error(span, str(record.status))


def _set_error(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))


def traceparent() -> str:
    """Returns the trace context of the HTTP request that is being handled, for the service; empty if it has none."""
    return "".join(value for _, value in trace_metadata())


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Returns the same as metadata of a call."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return tuple((name, value) for name, value in carrier.items() if name == _TRACEPARENT)

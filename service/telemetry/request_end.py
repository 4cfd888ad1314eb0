"""Reports a request that has ended, in its span, in metrics and in a log line, without prompt and output."""

import logging

from opentelemetry.trace import Span, format_trace_id

from penstock.scheduler.request import SpeculationCounts
from penstock.service.telemetry.metrics import End, Metrics
from penstock.service.telemetry.tracing import end_request

_log = logging.getLogger(__name__)


def report_end(span: Span, metrics: Metrics, end: End) -> None:
    """Ends the span, counts the request and logs how it ended."""
    finished, reason, code = end.finished, end.reason, end.code
    metrics.ended(end)
    end_request(span, finished, reason, code)
    if not _log.isEnabledFor(logging.INFO):
        return
    usage, timings, client_request_id = finished.usage, finished.timings, end.client_request_id[:128]
    speculation = finished.speculation or SpeculationCounts()
    field = "" if end.refusal is None else end.refusal.field
    data: dict[str, object] = {
        "request_id": end.request_id,
        "client_request_id": client_request_id,
        "tenant": end.tenant,
        "operation": end.operation,
        "code": code.name,
        "reason": reason,
        "field": field,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "drafted_tokens": speculation.drafted,
        "accepted_tokens": speculation.accepted,
        "queued_ms": timings.queued_us // 1000,
        "first_token_ms": timings.first_token_us // 1000,
        "total_ms": timings.total_us // 1000,
        "preemptions": timings.preemptions,
        "worker_restarts": timings.restarts,
    }
    context = span.get_span_context()
    if context.is_valid:
        data["trace_id"] = format_trace_id(context.trace_id)
    _log.info(
        "request %s (tenant %s, client id %r): %s%s, %s after %d ms; tokens: prompt %d, cached %d, output %d",
        end.request_id,
        end.tenant,
        client_request_id,
        reason,
        f" at {field}" if field else "",
        code.name,
        timings.total_us // 1000,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.output_tokens,
        extra={"data": data},
    )

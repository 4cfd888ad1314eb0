"""Reports a request that has ended, in its span, in metrics and in a log line, without prompt and output."""

import logging

from penstock.scheduler.request import SpeculationCounts
from penstock.service.telemetry.metrics import End, Metrics
from penstock.service.telemetry.tracing import RequestSpan

_log = logging.getLogger(__name__)


def report_end(span: RequestSpan, metrics: Metrics, end: End) -> None:
    """Ends the span, counts the request and logs how it ended."""
    finished, reason, code = end.finished, end.reason, end.code
    metrics.ended(end)
    span.end_request(finished, reason, code)
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
    if span.trace_id:
        data["trace_id"] = span.trace_id
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

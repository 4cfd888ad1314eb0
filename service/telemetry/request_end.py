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
    usage, timings = finished.usage, finished.timings
    speculation = finished.speculation or SpeculationCounts()
    field = "" if end.refusal is None else end.refusal.field
    data: dict[str, object] = {
        "request_id": end.request_id,
        "client_request_id": end.client_request_id[:128],
        "session_id": end.session_id[:128],
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
    line = "request %(request_id)s (tenant %(tenant)s, client id %(client_request_id)r"
    line += ", session %(session_id)r): %(reason)s" if end.session_id else "): %(reason)s"
    if field:
        line += " at %(field)s"
    line += ", %(code)s after %(total_ms)d ms; tokens: prompt %(prompt_tokens)d, cached %(cached_tokens)d, "
    _log.info(line + "output %(output_tokens)d", data, extra={"data": data})

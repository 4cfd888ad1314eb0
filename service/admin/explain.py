"""Explain: converts the scheduler's timeline of a request to a protobuf message."""

import time

import penstock.v1 as pb
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.timeline import EntryKind, TimelineEntry
from penstock.service.errors import Reason, ServiceError
from penstock.service.streaming.messages import milliseconds

_KINDS = {kind: pb.TimelineKind.Value(f"TIMELINE_KIND_{kind.name}") for kind in EntryKind}


def explain(engine: Engine, request_id: str) -> pb.ExplainResponse:
    """Returns the timeline of a live request, or of one of the last that ended. Entries that have not ended are shown
    as if they ended now. Raises ServiceError REQUEST_UNKNOWN."""
    timeline = engine.explain(request_id)
    if timeline is None:
        raise ServiceError(
            Reason.REQUEST_UNKNOWN,
            f"no request with this id is live or among the last {engine.config.explain_requests:,} that ended; "
            "--explain-requests keeps more",
            field="request_id",
        )
    now, arrival = time.monotonic(), timeline.arrival
    predicted_s, first_token_at = timeline.predicted_ttft_s, timeline.first_token_at
    return pb.ExplainResponse(
        request_id=timeline.request_id,
        tenant=timeline.tenant,
        client_request_id=timeline.client_request_id,
        arrived_unix_us=_microseconds(time.time() - (now - arrival)),
        predicted_ttft_ms=None if predicted_s is None else milliseconds(predicted_s),
        first_token_us=None if first_token_at is None else _microseconds(first_token_at - arrival),
        prompt_tokens=timeline.prompt_tokens,
        max_tokens=timeline.max_tokens,
        num_choices=timeline.num_choices,
        ended=timeline.ended_by,
        timeline=[_entry(entry, arrival, now) for entry in timeline.entries()],
        omitted_entries=timeline.num_omitted,
    )


def _entry(entry: TimelineEntry, arrival: float, now: float) -> pb.TimelineEntry:
    until = now if entry.until is None else entry.until
    at_us = _microseconds(entry.at - arrival)
    return pb.TimelineEntry(
        at_us=at_us,
        # The difference of the rounded times, so that the next entry begins where this one ends.
        duration_us=max(0, _microseconds(until - arrival) - at_us),
        choice=entry.choice,
        kind=_KINDS[entry.kind],
        first_step=entry.first_step,
        last_step=entry.last_step,
        num_tokens=entry.num_tokens,
        detail=entry.detail,
    )


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))

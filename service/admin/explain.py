"""Explain: converts the scheduler's timeline of a request to a protobuf message."""

import time

from google.protobuf import duration, timestamp

import penstock.v1 as pb
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.request import EngineFinishReason
from penstock.scheduler.timeline_entry import (
    AcceptedDetail,
    BeganDetail,
    Detail,
    DraftDetail,
    EntryKind,
    HoldCause,
    PreemptionCause,
    PreemptionDetail,
    TimelineEntry,
    UpdateDetail,
    WaitCause,
    WaitDetail,
)
from penstock.service.config.durations import to_duration
from penstock.service.errors import Reason, ServiceError

_KINDS = {kind: pb.TimelineKind.Value(f"TIMELINE_KIND_{kind.name}") for kind in EntryKind}
_WAITS = {cause: pb.WaitCause.Value(f"WAIT_CAUSE_{cause.name}") for cause in WaitCause}
_HOLDS = {cause: pb.HoldCause.Value(f"HOLD_CAUSE_{cause.name}") for cause in HoldCause}
_PREEMPTIONS = {cause: pb.PreemptionCause.Value(f"PREEMPTION_CAUSE_{cause.name}") for cause in PreemptionCause}
_ENDS = {reason: pb.RequestEnd.Value(f"REQUEST_END_{reason.name}") for reason in EngineFinishReason}
_NUMBERS = {
    WaitCause.TURN: ("requests_ahead",),
    WaitCause.ROWS: ("max_rows",),
    WaitCause.BLOCKS: ("free_blocks", "needed_blocks"),
    WaitCause.BUDGET: ("step_tokens",),
    WaitCause.STATES: ("state_slots",),
}
"""The fields of the numbers of each wait."""


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
        arrive_time=timestamp.from_microseconds(_microseconds(time.time() - (now - arrival))),
        predicted_ttft=None if predicted_s is None else to_duration(predicted_s),
        time_to_first_token=None if first_token_at is None else to_duration(first_token_at - arrival),
        prompt_tokens=timeline.prompt_tokens,
        max_tokens=timeline.max_tokens,
        num_choices=timeline.num_choices,
        end=pb.REQUEST_END_UNSPECIFIED if timeline.ended_by is None else _ENDS[timeline.ended_by],
        timeline=[_entry(entry, arrival, now) for entry in timeline.entries()],
        omitted_entries=timeline.num_omitted,
    )


def _entry(entry: TimelineEntry, arrival: float, now: float) -> pb.TimelineEntry:
    until = now if entry.until is None else entry.until
    at_us = _microseconds(entry.at - arrival)
    message = pb.TimelineEntry(
        start_offset=duration.from_microseconds(at_us),
        # The difference of the rounded times, so that the next entry begins where this one ends.
        duration=duration.from_microseconds(max(0, _microseconds(until - arrival) - at_us)),
        choice=entry.choice,
        kind=_KINDS[entry.kind],
        first_step=entry.first_step,
        last_step=entry.last_step,
        num_tokens=entry.num_tokens,
    )
    _add_detail(message, entry.detail)
    return message


def _add_detail(message: pb.TimelineEntry, detail: Detail) -> None:
    match detail:
        case AcceptedDetail():
            message.queue_position = detail.position
        case WaitDetail():
            message.wait.cause = _WAITS[detail.cause]
            for name, number in zip(_NUMBERS.get(detail.cause, ()), detail.numbers, strict=True):
                setattr(message.wait, name, number)
        case BeganDetail():
            message.missed_tokens = detail.num_missed_tokens
        case DraftDetail():
            message.drafts.drafted_tokens = detail.num_drafted
            message.drafts.accepted_tokens = detail.num_accepted
        case PreemptionDetail():
            message.preemption.cause = _PREEMPTIONS[detail.cause]
            message.preemption.for_request_id = detail.for_request_id
            if detail.num_blocks:
                message.preemption.needed_blocks = detail.num_blocks
        case HoldCause():
            message.hold_cause = _HOLDS[detail]
        case UpdateDetail():
            timeout = None if detail.timeout_s is None else to_duration(detail.timeout_s)
            update = pb.UpdateDetail(priority=detail.priority, timeout=timeout, max_tokens=detail.max_tokens)
            message.update.CopyFrom(update)
        case EngineFinishReason():
            message.end = _ENDS[detail]


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))

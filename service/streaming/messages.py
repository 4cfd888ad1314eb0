"""Converts the engine's events to protobuf messages. Knows neither streams nor when messages are sent."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from google.rpc import status_pb2

import penstock.v1 as pb
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.plan import TokenLogprobs
from penstock.scheduler.request import (
    EngineFinishReason,
    RequestAccepted,
    RequestFinished,
    RequestTimings,
    SequenceDelta,
    SpeculationCounts,
    TokensInjected,
)
from penstock.service.config.limits import UINT32_MAX
from penstock.service.parsers.base import merge_calls
from penstock.service.streaming.parsed_delta import ParsedSequenceDelta
from penstock.service.streaming.pending_message import OutputForm, PendingMessage

_REASONS: Mapping[EngineFinishReason, "pb.FinishReason.ValueType"] = {
    **dict.fromkeys(EngineFinishReason, pb.FINISH_REASON_ERROR),
    EngineFinishReason.STOP: pb.FINISH_REASON_STOP,
    EngineFinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    EngineFinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    EngineFinishReason.SUPERSEDED: pb.FINISH_REASON_CANCELLED,
    EngineFinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
}


SERVICE_STATES = {state: pb.ServiceState.Value(f"SERVICE_STATE_{state.name}") for state in EngineState}
"""The states of the engine as those of the service."""


def stream_messages(batch: PendingMessage) -> tuple[pb.GenerateResponse]:
    """Builds a message of Generate."""
    message = pb.GenerateResponse()
    _fill(message, batch)
    # Most messages have only deltas, so empty lists are not even passed to protobuf.
    if batch.accepted:
        message.accepted.extend(batch.accepted)
    if batch.finished:
        message.finished.extend(batch.finished)
    if batch.frames_refused:
        message.frames_refused.extend(batch.frames_refused)
    if batch.injected:
        message.injected.extend(batch.injected)
    return (message,)


def single_messages(batch: PendingMessage) -> tuple[pb.GenerateOneResponse]:
    """Builds a message of GenerateOne, whose stream has one request."""
    message = pb.GenerateOneResponse()
    _fill(message, batch)
    for accepted in batch.accepted:
        message.accepted.CopyFrom(accepted)
    for finished in batch.finished:
        message.finished.CopyFrom(finished)
    return (message,)


def accepted_message(
    ref: int,
    request_id: str,
    client_request_id: str,
    num_prompt_tokens: int,
    accepted: RequestAccepted,
    age_s: float,
    ticket: bytes,
) -> pb.Accepted:
    """Builds the message for a request that entered the queue. ``age_s`` is the time since its arrival, and ``ticket``
    what other replicas need to resume it."""
    ttft_s = accepted.predicted_ttft_s
    return pb.Accepted(
        ref=ref,
        request_id=request_id,
        prompt_tokens=num_prompt_tokens,
        cached_tokens=accepted.cached_tokens,
        queue_position=accepted.queue_position,
        predicted_ttft_ms=None if ttft_s is None else milliseconds(age_s + ttft_s),
        client_request_id=client_request_id,
        resume_ticket=ticket,
    )


def injected_message(ref: int, event: TokensInjected, append_ids: Sequence[int]) -> pb.Injected:
    """Builds the message for tokens that were injected into the output of a request. ``append_ids`` are the numbers of
    the appends that they came from; 0 means none."""
    return pb.Injected(
        ref=ref,
        output_tokens=event.num_output_tokens,
        injected_tokens=event.num_tokens,
        append_ids=filter(None, append_ids),
    )


def finished_message(
    ref: int,
    superseded_by: int,
    request_id: str,
    finished: RequestFinished,
    status: status_pb2.Status,
    seed: int | None,
    may_continue: bool,
) -> pb.Finished:
    """Builds the message for a request's end. ``seed`` is None if the request was not admitted. ``superseded_by`` is
    the ref of the request that replaced it, if one did."""
    return pb.Finished(
        ref=ref,
        status=status,
        usage=pb.Usage(**asdict(finished.usage)),
        timings=_timings(finished.timings),
        may_continue=may_continue,
        reason=_REASONS[finished.reason],
        seed=seed,
        request_id=request_id,
        speculation=None if finished.speculation is None else _speculation(finished.speculation),
        superseded_by=superseded_by if finished.reason is EngineFinishReason.SUPERSEDED else 0,
    )


def _timings(timings: RequestTimings) -> pb.Timings:
    return pb.Timings(
        queued_ms=timings.queued_us / 1000,
        prefill_ms=timings.prefill_us / 1000,
        first_token_ms=timings.first_token_us / 1000,
        total_ms=timings.total_us / 1000,
        preemptions=timings.preemptions,
        restarts=timings.restarts,
    )


def _speculation(speculation: SpeculationCounts) -> pb.Speculation:
    return pb.Speculation(
        drafted_tokens=speculation.drafted,
        accepted_tokens=speculation.accepted,
        steps=speculation.steps,
        drafted_at=speculation.drafted_at,
        accepted_at=speculation.accepted_at,
        predicted_tokens=speculation.predicted,
        accepted_predicted_tokens=speculation.accepted_predicted,
    )


def milliseconds(seconds: float) -> int:
    """Converts to milliseconds, limited to the largest value of a 32-bit field."""
    return round(min(seconds * 1000, UINT32_MAX))


def fill_logprobs(out: pb.Logprobs, logprobs: TokenLogprobs, token_ids: Sequence[int], form: OutputForm) -> None:
    """Appends the ``logprobs`` of these tokens to ``out``, which collects the parts of one choice or prompt in
    order."""
    out.num_top = logprobs.num_top
    out.chosen.extend(logprobs.chosen)
    out.top_token_ids.extend(logprobs.top_token_ids)
    out.top.extend(logprobs.top)
    if form.token_text is not None:
        out.chosen_texts.extend(map(form.token_text, token_ids))
        out.top_texts.extend(map(form.token_text, logprobs.top_token_ids))


def fill_delta(out: pb.Delta | pb.Choice, form: OutputForm, deltas: Sequence[SequenceDelta]) -> None:
    """Fills in consecutive deltas of one choice, joined."""
    if form.text:
        out.text = deltas[0].text if len(deltas) == 1 else "".join([delta.text for delta in deltas])
    for delta in deltas:
        if form.token_ids:
            out.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            fill_logprobs(out.logprobs, delta.logprobs, delta.token_ids, form)
            if form.text and delta.text_lengths is not None:
                out.logprobs.text_lengths.extend(delta.text_lengths)
        if (end := delta.end) is not None:
            out.end.reason = _REASONS[end.reason]
            if end.stop is not None:
                out.end.stop = end.stop
            elif end.stop_token_id is not None:
                out.end.stop_token_id = end.stop_token_id
    if form.parsed:
        _fill_parsed(out, form, deltas)


def _fill_parsed(out: pb.Delta | pb.Choice, form: OutputForm, deltas: Sequence[SequenceDelta]) -> None:
    """Fills in reasoning and calls, the latter only in a ``Delta``."""
    parsed = [delta for delta in deltas if isinstance(delta, ParsedSequenceDelta)]
    if form.text:
        out.reasoning = "".join([delta.reasoning for delta in parsed])
    if isinstance(out, pb.Delta):
        for call in merge_calls(call for delta in parsed for call in delta.calls):
            out.tool_calls.add(
                index=call.index,
                id=call.id,
                name=call.name,
                arguments_json=call.arguments,
                text_offset=call.at if call.id else 0,
                is_incomplete=call.breaks_off,
            )
    if any(delta.ends_with_calls for delta in parsed):
        out.end.reason = pb.FINISH_REASON_TOOL_CALLS


def _fill(message: pb.GenerateResponse | pb.GenerateOneResponse, batch: PendingMessage) -> None:
    for ref, form, part in batch.prompt_logprobs:
        out = message.prompt_logprobs.add(ref=ref, start=part.start).logprobs
        fill_logprobs(out, part.logprobs, part.token_ids, form)
    add = message.deltas.add
    for (ref, choice), (form, deltas) in batch.deltas.items():
        fill_delta(add(ref=ref, choice=choice), form, deltas)
    if batch.heartbeat is not None:
        message.heartbeat.CopyFrom(batch.heartbeat)

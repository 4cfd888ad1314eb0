"""The end of a choice: its reason in OpenAI's terms, and the stop's text for callers that want it in the output."""

from collections.abc import Iterable, Mapping

from penstock.clients.events import ChoiceEnd, Delta, FinishReason
from penstock.clients.gateway.schemas.common import GenerationBody
from penstock.v1 import TokenDescription

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.TOOL_CALLS: "tool_calls"}


def finish_reason(end: ChoiceEnd) -> str | None:
    """Returns OpenAI's finish reason; None if the request failed, which an error reports."""
    return _REASONS.get(end.reason)


def stop_reason(end: ChoiceEnd, eos_token_ids: frozenset[int]) -> int | str | None:
    """Returns vLLM's stop reason: the request's stop string or stop token that matched; None at the model's end of
    sequence."""
    if end.stop_token_id is not None and end.stop_token_id not in eos_token_ids:
        return end.stop_token_id
    return end.stop


def shown_stops(deltas: Iterable[Delta], body: GenerationBody) -> set[int]:
    """Returns the stop tokens whose text ``with_stop`` needs."""
    if not body.include_stop_str_in_output:
        return set()
    ends = (delta.end for delta in deltas)
    return {end.stop_token_id for end in ends if end is not None and end.stop_token_id is not None}


def with_stop(delta: Delta, body: GenerationBody, known: Mapping[int, TokenDescription]) -> str:
    """Returns the delta's text, with the stop that ended the output if the request keeps it. ``known`` contains the
    ``shown_stops``."""
    end = delta.end
    if not body.include_stop_str_in_output or end is None:
        return delta.text
    if end.stop is not None:
        return delta.text + end.stop
    if end.stop_token_id is None:
        return delta.text
    token = known[end.stop_token_id]
    is_hidden = token.is_special and body.skip_special_tokens is not False
    return delta.text if is_hidden else delta.text + token.text.decode(errors="replace")

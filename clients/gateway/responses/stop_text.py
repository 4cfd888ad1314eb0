"""The end of a choice: its reason in OpenAI's terms, and the stop's text for callers that want it in the output."""

from penstock.clients.events import ChoiceEnd, Delta, FinishReason
from penstock.clients.gateway.responses.logprobs import TokenNames, named_ids
from penstock.clients.gateway.schemas.common import GenerationBody

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


def described_ids(delta: Delta, body: GenerationBody) -> set[int]:
    """Returns the tokens of a delta that the answer names, and the one whose text ``with_stop`` needs."""
    ids = set() if delta.logprobs is None else named_ids(delta.token_ids, delta.logprobs)
    if body.include_stop_str_in_output and delta.end is not None and delta.end.stop_token_id is not None:
        ids.add(delta.end.stop_token_id)
    return ids


def with_stop(delta: Delta, body: GenerationBody, names: TokenNames) -> str:
    """Returns the delta's text, with the stop that ended the output if the request keeps it."""
    end = delta.end
    if not body.include_stop_str_in_output or end is None:
        return delta.text
    if end.stop is not None:
        return delta.text + end.stop
    if end.stop_token_id is None:
        return delta.text
    return delta.text + names.shown(end.stop_token_id, specials=body.skip_special_tokens is False)

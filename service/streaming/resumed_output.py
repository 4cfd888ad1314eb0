"""Drops from the output of a resumed request what its caller has received from another replica."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import penstock.v1 as pb
from penstock.scheduler.request import PromptLogprobsChunk, SequenceDelta
from penstock.service.parsers.base import ToolCallDelta
from penstock.service.streaming.outbox import RequestReceiver
from penstock.service.streaming.parsed_delta import ParsedSequenceDelta
from penstock.service.streaming.pending_message import OutputForm


class ResumingReceiver:
    """Passes a request's output to another receiver, from where its caller's copy ends."""

    def __init__(self, receiver: RequestReceiver, received: Sequence[pb.ReceivedOutput]) -> None:
        """``received`` has what the caller has of each choice."""
        self._receiver = receiver
        self._choices = [_Rest(each) for each in received]

    def accepted(self, accepted: pb.Accepted) -> None:
        self._receiver.accepted(accepted)

    def prompt_logprobs(self, ref: int, part: PromptLogprobsChunk, form: OutputForm) -> None:
        self._receiver.prompt_logprobs(ref, part, form)

    def delta(self, ref: int, delta: SequenceDelta, form: OutputForm, at_once: bool) -> None:
        """Passes on the part of ``delta`` that is new."""
        rest = self._choices[delta.choice].of_delta(delta)
        if rest is not None:
            self._receiver.delta(ref, rest, form, at_once)

    def injected(self, injected: pb.Injected) -> None:
        self._receiver.injected(injected)

    def finished(self, finished: pb.Finished) -> None:
        self._receiver.finished(finished)

    def fail(self, error: Exception) -> None:
        self._receiver.fail(error)


class _Rest:
    """What is left to drop from the output of one choice."""

    def __init__(self, received: pb.ReceivedOutput) -> None:
        self._num_tokens = len(received.token_ids)
        self._num_chars = received.text_chars
        self._num_reasoning_chars = received.reasoning_chars
        self._num_calls = received.tool_calls
        self._num_argument_chars = received.argument_chars
        self._has_ended = received.has_ended

    def of_delta(self, delta: SequenceDelta) -> SequenceDelta | None:
        """Returns what is new in ``delta``; None if nothing is."""
        if self._has_ended:
            return None
        num_tokens, num_chars = min(self._num_tokens, len(delta.token_ids)), min(self._num_chars, len(delta.text))
        self._num_tokens -= num_tokens
        self._num_chars -= num_chars
        rest = replace(delta, token_ids=delta.token_ids[num_tokens:], text=delta.text[num_chars:])
        if delta.logprobs is not None:
            rest.logprobs = delta.logprobs.part(num_tokens, len(delta.token_ids))
        if delta.text_lengths is not None:
            rest.text_lengths = delta.text_lengths[num_tokens:]
        is_new = bool(rest.token_ids or rest.text or rest.end is not None)
        if isinstance(rest, ParsedSequenceDelta):
            num_chars = min(self._num_reasoning_chars, len(rest.reasoning))
            self._num_reasoning_chars -= num_chars
            rest.reasoning = rest.reasoning[num_chars:]
            rest.calls = tuple(self._of_calls(rest.calls))
            is_new = is_new or bool(rest.reasoning or rest.calls)
        return rest if is_new else None

    def _of_calls(self, calls: Sequence[ToolCallDelta]) -> Iterator[ToolCallDelta]:
        """Yields what is new in parts of calls. The caller knows the ids and names of those that began."""
        for call in calls:
            if call.index >= self._num_calls:
                yield call
            elif call.index == self._num_calls - 1:
                num_chars = min(self._num_argument_chars, len(call.arguments))
                self._num_argument_chars -= num_chars
                if call.arguments[num_chars:] or call.breaks_off:
                    yield replace(call, id="", name="", arguments=call.arguments[num_chars:])

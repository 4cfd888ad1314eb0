"""Translates the output of one request to GenerateResponses: chunks if it streams, and one complete for each choice.

The completes are sent when the request has ended, so that their numbers are final.
"""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

import penstock.v1 as pb
from penstock.scheduler.plan import TokenLogprobs
from penstock.scheduler.request import EngineFinishReason, SequenceDelta, StopMatch
from penstock.service.config.limits import MAX_CHOICES
from penstock.service.requests.live.lifecycle import RequestLifecycle
from penstock.service.streaming.pending_message import PendingMessage

_REASONS = {EngineFinishReason.STOP: "stop", EngineFinishReason.LENGTH: "length"}
_ABORTED = "abort"


@dataclass(slots=True)
class _Choice:
    """The output of one choice so far."""

    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: vllm.OutputLogProbs | None = None
    """All tokens, if the output does not stream."""
    end: StopMatch | None = None
    has_begun: bool = False


class OutputEncoder:
    """Builds the messages of one request."""

    live: RequestLifecycle
    """The request, set before its first event."""

    def __init__(self, start: pb.GenerationStart, streams: bool, eos_token_ids: Collection[int]) -> None:
        """``streams``: whether there are chunks. ``eos_token_ids`` are the model's own stop tokens."""
        self._streams = streams
        self._unreported = frozenset(eos_token_ids).difference(start.sampling.stop_token_ids)
        """Stop tokens that the caller did not request. The contract does not report them as matches."""
        self._choices = [_Choice() for _ in range(min(start.sampling.n, MAX_CHOICES))]
        self._prompt_logprobs: TokenLogprobs | None = None
        self._prompt_tokens = self._cached_tokens = 0
        self.is_aborted = False
        """Whether an Abort ended the request. Its end is then not an error."""

    def __call__(self, batch: PendingMessage) -> list[vllm.GenerateResponse]:
        """Returns the messages for a step's output."""
        for accepted in batch.accepted:
            self._prompt_tokens, self._cached_tokens = accepted.prompt_tokens, accepted.cached_tokens
        for _, _, part in batch.prompt_logprobs:
            if self._prompt_logprobs is None:
                self._prompt_logprobs = part.logprobs
            else:
                self._prompt_logprobs.extend(part.logprobs)
        messages = []
        for (_, index), (_, deltas) in batch.deltas.items():
            chunk = self._chunk(index, deltas)
            if chunk is not None:
                messages.append(vllm.GenerateResponse(chunk=chunk))
        for finished in batch.finished:
            if not finished.status.code or self.is_aborted:
                self._prompt_tokens = finished.usage.prompt_tokens or self._prompt_tokens
                self._cached_tokens = finished.usage.cached_tokens
                completes = (self._complete(index, finished.speculation) for index in range(len(self._choices)))
                messages += [vllm.GenerateResponse(complete=complete) for complete in completes]
        return messages

    def _chunk(self, index: int, deltas: Sequence[SequenceDelta]) -> vllm.GenerateStreamChunk | None:
        choice = self._choices[index]
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        choice.token_ids.extend(token_ids)
        choice.end = deltas[-1].end
        logprobs = _output_logprobs(deltas)
        if not self._streams:
            if logprobs is not None:
                choice.logprobs = choice.logprobs or vllm.OutputLogProbs()
                choice.logprobs.MergeFrom(logprobs)
            return None
        if not token_ids:
            return None
        is_first, choice.has_begun = not choice.has_begun, True
        return vllm.GenerateStreamChunk(
            token_ids=token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(choice.token_ids),
            cached_tokens=self._cached_tokens,
            output_logprobs=logprobs,
            input_logprobs=self._input_logprobs() if is_first else None,
            index=index,
        )

    def _complete(self, index: int, speculation: pb.Speculation) -> vllm.GenerateComplete:
        choice = self._choices[index]
        end = choice.end
        complete = vllm.GenerateComplete(
            output_ids=choice.token_ids,
            finish_reason=_ABORTED if end is None else _REASONS.get(end.reason, _ABORTED),
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(choice.token_ids),
            cached_tokens=self._cached_tokens,
            output_logprobs=choice.logprobs,
            input_logprobs=None if choice.has_begun else self._input_logprobs(),
            index=index,
        )
        if end is not None and end.stop is not None:
            complete.matched_stop_str = end.stop
        elif end is not None and end.stop_token_id is not None and end.stop_token_id not in self._unreported:
            complete.matched_token_id = end.stop_token_id
        if index == 0:  # drafts are counted per request
            complete.spec_accepted_tokens = speculation.accepted_tokens
            complete.spec_draft_tokens = speculation.drafted_tokens
        return complete

    def _input_logprobs(self) -> vllm.InputLogProbs | None:
        logprobs = self._prompt_logprobs
        if logprobs is None:
            return None
        out = vllm.InputLogProbs(token_ids=self.live.prompt_token_ids)
        out.token_logprobs.add()  # the first token has none
        out.token_logprobs.extend([vllm.InputTokenLogProb(value=value) for value in logprobs.chosen])
        if logprobs.num_top:
            out.top_logprobs.add()
            out.top_logprobs.extend(_top_logprobs(logprobs))
        return out


def _output_logprobs(deltas: Sequence[SequenceDelta]) -> vllm.OutputLogProbs | None:
    if deltas[0].logprobs is None:
        return None
    out = vllm.OutputLogProbs()
    for delta in deltas:
        if delta.logprobs is not None:
            out.token_logprobs.extend(delta.logprobs.chosen)
            out.token_ids.extend(delta.token_ids)
            if delta.logprobs.num_top:
                out.top_logprobs.extend(_top_logprobs(delta.logprobs))
    return out


def _top_logprobs(logprobs: TokenLogprobs) -> list[vllm.TopLogProbs]:
    k = logprobs.num_top
    return [
        vllm.TopLogProbs(values=logprobs.top[first : first + k], token_ids=logprobs.top_token_ids[first : first + k])
        for first in range(0, k * len(logprobs.chosen), k)
    ]

"""Translates the output of one request to GenerateResponses.

Each output of the request ends with one GenerationFinished. The usage is on the last message of the stream, so the
last GenerationFinished waits until the request has ended.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from google.rpc import code_pb2, error_details_pb2, status_pb2
from openengine.v1 import error_pb2, generation_pb2 as oe

import penstock.v1 as pb
from penstock.scheduler.plan import TokenLogprobs
from penstock.scheduler.request import EngineFinishReason, SequenceDelta, StopMatch
from penstock.service.config.limits import MAX_CHOICES
from penstock.service.requests.live.lifecycle import RequestLifecycle
from penstock.service.rpc.foreign.contracts import renamed_status
from penstock.service.rpc.openengine.generation_start import field_names, stop_token_ids
from penstock.service.streaming.pending_message import PendingMessage
from penstock.service.text.token_table import TokenTextTable

_REASONS = {
    EngineFinishReason.STOP: oe.FINISH_REASON_STOP,
    EngineFinishReason.LENGTH: oe.FINISH_REASON_LENGTH,
}
_ERROR_CODES: Mapping[int, Any] = {
    code_pb2.INVALID_ARGUMENT: error_pb2.ERROR_CODE_INVALID_ARGUMENT,
    code_pb2.FAILED_PRECONDITION: error_pb2.ERROR_CODE_UNSUPPORTED_FEATURE,
    code_pb2.RESOURCE_EXHAUSTED: error_pb2.ERROR_CODE_OVERLOADED,
    code_pb2.CANCELLED: error_pb2.ERROR_CODE_CANCELLED,
    code_pb2.ABORTED: error_pb2.ERROR_CODE_CANCELLED,
}
"""The contract's codes; ERROR_CODE_INTERNAL for all others."""


class EventEncoder:
    """Builds the messages of one request."""

    live: RequestLifecycle
    """The request, set before its first event."""

    def __init__(self, request: oe.GenerateRequest, start: pb.GenerationStart, pieces: TokenTextTable) -> None:
        self._request = request
        self._pieces = pieces
        self._stop_token_ids = stop_token_ids(request.stopping)
        self._shows_stop = request.stopping.include_stop_in_output
        self._unfinished = set(range(min(start.sampling.n, MAX_CHOICES) if start.sampling.HasField("n") else 1))
        """The outputs that have not ended."""
        self._last: oe.GenerationFinished | None = None
        """The end of the last output, which waits for the usage."""
        self._prompt_logprobs: TokenLogprobs | None = None
        self.is_aborted = False
        """Whether an Abort ended the request. Its end is then not an error."""

    def __call__(self, batch: PendingMessage) -> list[oe.GenerateResponse]:
        """Returns the messages for a step's output."""
        messages: list[oe.GenerateResponse] = []
        for _, _, part in batch.prompt_logprobs:
            if self._prompt_logprobs is None:
                self._prompt_logprobs = part.logprobs
            else:
                self._prompt_logprobs.extend(part.logprobs)
        if batch.deltas and self._prompt_logprobs is not None:
            messages.append(self._message(prompt=self._prompt_output(self._prompt_logprobs)))
            self._prompt_logprobs = None
        for (_, index), (_, deltas) in batch.deltas.items():
            messages += self._outputs(index, deltas)
        for finished in batch.finished:
            messages += self._ends(finished)
        return messages

    @property
    def request_id(self) -> str:
        """The caller's id of the request; the service's own if there is none."""
        return self._request.request_id or self.live.request_id

    def _message(self, **event: object) -> oe.GenerateResponse:
        return oe.GenerateResponse(request_id=self.request_id, **event)

    def _outputs(self, index: int, deltas: Sequence[SequenceDelta]) -> list[oe.GenerateResponse]:
        """Returns the messages for new output of one choice, with its end."""
        end = deltas[-1].end
        text = "".join(delta.text for delta in deltas)
        if end is not None and self._shows_stop:
            text += self._matched_text(end)
        tokens = [info for delta in deltas for info in self._infos(delta.token_ids, delta.logprobs)]
        messages = []
        if tokens or text:
            messages.append(self._message(token=oe.TokenOutput(output_index=index, tokens=tokens, text=text)))
        if end is not None and end.reason in _REASONS:
            finished = oe.GenerationFinished(
                output_index=index, reason=_REASONS[end.reason], stop_match=self._stop_match(end)
            )
            self._unfinished.discard(index)
            if self._unfinished:
                messages.append(self._message(finished=finished))
            else:
                self._last = finished
        return messages

    def _ends(self, finished: pb.Finished) -> list[oe.GenerateResponse]:
        """Returns the messages for the end of the request. The last one has its usage. There are none after the
        deadline of the call, which is its status."""
        if self._last is not None:
            messages = [self._message(finished=self._last)]
        elif self.is_aborted:
            messages = [
                self._message(finished=oe.GenerationFinished(output_index=index, reason=oe.FINISH_REASON_CANCELLED))
                for index in sorted(self._unfinished)
            ]
        elif finished.status.code == code_pb2.DEADLINE_EXCEEDED:
            return []
        else:
            messages = [self._message(error=self._engine_error(finished.status))]
        usage = finished.usage
        messages[-1].usage.CopyFrom(
            oe.Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.output_tokens,
                total_tokens=usage.prompt_tokens + usage.output_tokens,
                cached_prompt_tokens=usage.cached_tokens,
            )
        )
        return messages

    def _engine_error(self, status: status_pb2.Status) -> error_pb2.EngineError:
        can_retry = any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details)
        return error_pb2.EngineError(
            code=_ERROR_CODES.get(status.code, error_pb2.ERROR_CODE_INTERNAL),
            message=renamed_status(status, field_names(self._request)).message,
            retryable=can_retry or status.code == code_pb2.UNAVAILABLE,
        )

    def _stop_match(self, end: StopMatch) -> oe.StopMatch | None:
        if end.stop is not None:
            return oe.StopMatch(stop_text=end.stop)
        if end.stop_token_id is None:
            return None
        if end.stop_token_id in self._stop_token_ids:
            return oe.StopMatch(stop_token_id=end.stop_token_id)
        return oe.StopMatch(eos_token_id=end.stop_token_id)

    def _matched_text(self, end: StopMatch) -> str:
        """Returns the text of the caller's stop string or stop token that ended the output; empty for any other end."""
        if end.stop is not None:
            return end.stop
        return self._text(end.stop_token_id) if end.stop_token_id in self._stop_token_ids else ""

    def _prompt_output(self, logprobs: TokenLogprobs) -> oe.PromptOutput:
        first, *rest = self.live.prompt_token_ids
        return oe.PromptOutput(tokens=[*self._infos([first], None), *self._infos(rest, logprobs)])

    def _infos(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> list[oe.TokenInfo]:
        infos = [oe.TokenInfo(token_id=token_id, token=self._text(token_id)) for token_id in token_ids]
        if logprobs is None:
            return infos
        k = logprobs.num_top
        for at, info in enumerate(infos):
            info.logprob = logprobs.chosen[at]
            top_ids = logprobs.top_token_ids[at * k : (at + 1) * k]
            top = logprobs.top[at * k : (at + 1) * k]
            if info.token_id in top_ids:
                info.rank = top_ids.index(info.token_id) + 1  # unknown otherwise
            for rank, (token_id, logprob) in enumerate(zip(top_ids, top, strict=True), 1):
                info.candidates.add(token_id=token_id, logprob=logprob, token=self._text(token_id), rank=rank)
        return infos

    def _text(self, token_id: int) -> str:
        """Returns the text of a token by itself. Bytes that are only part of a character are replaced."""
        return self._pieces.by_itself(token_id).decode(errors="replace")

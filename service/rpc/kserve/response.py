"""Builds the responses to requests for text: one for a whole output, or one for each part of one that streams."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.rpc import status_pb2

import penstock.v1 as pb
from penstock.scheduler.request import EngineFinishReason, SequenceDelta, StopMatch
from penstock.service.config.limits import MAX_CHOICES
from penstock.service.requests.generate import ResponseMode
from penstock.service.rpc.foreign.contracts import renamed_status
from penstock.service.rpc.kserve.request import (
    ANY_SIZE,
    CUMULATIVE_LOGPROB,
    FINISH_REASON,
    MODEL_VERSION,
    NUM_INPUT_TOKENS,
    NUM_OUTPUT_TOKENS,
    OUTPUTS,
    TEXT,
    InferOptions,
)
from penstock.service.rpc.kserve.tensors import Datatype, add_output, raw_numbers, raw_texts
from penstock.service.streaming.pending_message import PendingMessage
from penstock.v1.kserve import ModelInferResponse, ModelStreamInferResponse

_REASONS = {EngineFinishReason.STOP: "stop", EngineFinishReason.LENGTH: "length"}
_OWN_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
FINAL = "triton_final_response"
"""The parameter of a response on a stream: whether the request has no more."""


class ChoicePart(NamedTuple):
    """The output of one choice, or its new part."""

    text: str
    finish_reason: str
    """Empty if it has not ended."""
    num_tokens: int
    cumulative_logprob: float
    """The sum for all tokens so far."""


def _texts(parts: Sequence[ChoicePart], num_input_tokens: int) -> bytes:
    return raw_texts([part.text for part in parts])


def _finish_reasons(parts: Sequence[ChoicePart], num_input_tokens: int) -> bytes:
    return raw_texts([part.finish_reason for part in parts])


def _cumulative_logprobs(parts: Sequence[ChoicePart], num_input_tokens: int) -> bytes:
    return raw_numbers(Datatype.FP32, [part.cumulative_logprob for part in parts])


def _num_input_tokens(parts: Sequence[ChoicePart], num_input_tokens: int) -> bytes:
    return raw_numbers(Datatype.UINT32, [num_input_tokens])


def _num_output_tokens(parts: Sequence[ChoicePart], num_input_tokens: int) -> bytes:
    return raw_numbers(Datatype.UINT32, [part.num_tokens for part in parts])


_ELEMENTS: Mapping[str, Callable[[Sequence[ChoicePart], int], bytes]] = {
    TEXT: _texts,
    FINISH_REASON: _finish_reasons,
    CUMULATIVE_LOGPROB: _cumulative_logprobs,
    NUM_INPUT_TOKENS: _num_input_tokens,
    NUM_OUTPUT_TOKENS: _num_output_tokens,
}
"""The elements of each output."""


def empty_response(model_name: str, request_id: str) -> Any:
    """Returns a ModelInferResponse without outputs."""
    return ModelInferResponse(model_name=model_name, model_version=MODEL_VERSION, id=request_id)


class ResponseTemplate:
    """What all responses to a request have in common: everything but the elements. A step may build hundreds of
    responses."""

    def __init__(self, model_name: str, options: InferOptions, num_choices: int, **parameters: bool) -> None:
        """``parameters`` are those of the responses."""
        self._message = empty_response(model_name, options.request_id)
        for name, value in parameters.items():
            self._message.parameters[name].bool_param = value
        names = [name for name in OUTPUTS if name in options.outputs]
        for name in names:
            datatype, shape = OUTPUTS[name]
            add_output(self._message, name, datatype, [num_choices if size == ANY_SIZE else size for size in shape])
        self._elements = [_ELEMENTS[name] for name in names]

    def fill_response(self, response: Any, parts: Sequence[ChoicePart], num_input_tokens: int) -> None:
        """Fills a ModelInferResponse with the output of each choice."""
        response.CopyFrom(self._message)
        response.raw_output_contents.extend([elements(parts, num_input_tokens) for elements in self._elements])


def whole_response(model_name: str, options: InferOptions, complete: pb.CompleteResponse) -> Any:
    """Returns the response with a whole output."""
    parts = [
        ChoicePart(
            options.prefix + choice.text,
            _OWN_REASONS.get(choice.end.reason, ""),
            len(choice.token_ids),
            sum(choice.logprobs.chosen),
        )
        for choice in complete.choices
    ]
    response = ModelInferResponse()
    template = ResponseTemplate(model_name, options, len(parts))
    template.fill_response(response, parts, complete.finished.usage.prompt_tokens)
    return response


@dataclass(slots=True)
class _StreamedChoice:
    """The output of one choice that is not sent yet, and its sums so far."""

    texts: list[str]
    num_tokens: int = 0
    cumulative_logprob: float = 0.0
    end: StopMatch | None = None

    def add_delta(self, delta: SequenceDelta) -> None:
        self.texts.append(delta.text)
        self.num_tokens += len(delta.token_ids)
        if delta.logprobs is not None:
            self.cumulative_logprob += sum(delta.logprobs.chosen)
        self.end = delta.end or self.end

    def take_part(self) -> ChoicePart:
        reason = "" if self.end is None else _REASONS.get(self.end.reason, "")
        part = ChoicePart("".join(self.texts), reason, self.num_tokens, self.cumulative_logprob)
        self.texts, self.num_tokens = [], 0
        return part


class _StreamedRequest:
    """A live request of a stream."""

    def __init__(self, model_name: str, options: InferOptions, num_choices: int) -> None:
        self.options = options
        self.num_input_tokens = 0
        self.choices = [_StreamedChoice([options.prefix]) for _ in range(num_choices)]
        self._template = ResponseTemplate(model_name, options, num_choices, **{FINAL: False})

    @property
    def is_complete(self) -> bool:
        """Whether each choice has ended, and not because of a failure."""
        return all(choice.end is not None and choice.end.reason in _REASONS for choice in self.choices)

    def next_message(self, *, is_final: bool) -> Any:
        """Returns the message with the new output of each choice."""
        message = ModelStreamInferResponse()
        response = message.infer_response
        self._template.fill_response(response, [choice.take_part() for choice in self.choices], self.num_input_tokens)
        if is_final:
            response.parameters[FINAL].bool_param = True
        return message


class StreamEncoder:
    """Builds the messages of one stream, and keeps its live requests by their refs."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._requests: dict[int, _StreamedRequest] = {}
        self._ids: set[str] = set()
        self._refused_ids: dict[int, str] = {}
        """The ids of requests that are refused before they are live."""

    def has_live(self, request_id: str) -> bool:
        """Returns whether a live request has this id."""
        return request_id in self._ids

    def add_request(self, start: pb.GenerationStart, options: InferOptions) -> None:
        """Adds a request before its first output."""
        num_choices = min(start.sampling.n or 1, MAX_CHOICES)  # more are refused later
        self._requests[start.ref] = _StreamedRequest(start.model or self._model_name, options, num_choices)
        self._ids.add(options.request_id)

    def add_refused(self, ref: int, request_id: str) -> None:
        """Adds a request whose refusal follows."""
        self._refused_ids[ref] = request_id

    def mode_of(self, start: pb.GenerationStart) -> ResponseMode:
        """Returns how the output of a request is sent."""
        return ResponseMode.STREAMED if self._requests[start.ref].options.streams else ResponseMode.WHOLE

    def __call__(self, batch: PendingMessage) -> list[Any]:
        """Returns the messages for a step's output."""
        for accepted in batch.accepted:
            self._requests[accepted.ref].num_input_tokens = accepted.prompt_tokens
        for (ref, index), (_, deltas) in batch.deltas.items():
            choice = self._requests[ref].choices[index]
            for delta in deltas:
                choice.add_delta(delta)
        with_news = [self._requests[ref] for ref in dict.fromkeys([ref for ref, _ in batch.deltas])]
        # What ends a request waits for its end, so that its last response has outputs.
        messages = [
            request.next_message(is_final=False)
            for request in with_news
            if request.options.streams and not request.is_complete
        ]
        messages += [self._failure(refused.ref, refused.status) for refused in batch.frames_refused]
        messages += [self._end(finished) for finished in batch.finished]
        return messages

    def _end(self, finished: pb.Finished) -> Any:
        if finished.status.code:
            return self._failure(finished.ref, finished.status)
        request = self._removed(finished.ref)
        assert request is not None, "it was live"
        return request.next_message(is_final=True)

    def _failure(self, ref: int, status: status_pb2.Status) -> Any:
        request, request_id = self._removed(ref), self._refused_ids.pop(ref, "")
        if request is not None:
            request_id, status = request.options.request_id, renamed_status(status, request.options.field_names)
        response = empty_response(self._model_name, request_id)
        response.parameters[FINAL].bool_param = True
        return ModelStreamInferResponse(error_message=status.message, infer_response=response)

    def _removed(self, ref: int) -> _StreamedRequest | None:
        request = self._requests.pop(ref, None)
        if request is not None:
            self._ids.discard(request.options.request_id)
        return request

"""Builds the responses to requests for text: one for a whole output, or one for each part of one that streams."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, NamedTuple

from google.rpc import status_pb2

import penstock.v1 as pb
from penstock.scheduler.request import EngineFinishReason, SequenceDelta, StopMatch
from penstock.service.requests.generate import ResponseMode
from penstock.service.rpc.contracts import renamed_status
from penstock.service.rpc.kserve import request as names
from penstock.service.rpc.kserve.request import MODEL_VERSION, OUTPUTS, InferOptions
from penstock.service.rpc.kserve.tensors import Output, add_outputs
from penstock.service.streaming.pending_message import PendingMessage
from penstock.v1.kserve import ModelInferResponse, ModelStreamInferResponse

_REASONS = {EngineFinishReason.STOP: "stop", EngineFinishReason.LENGTH: "length"}
_OWN_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
MAX_CHOICES = 64
"""Limit of penstock.v1 on the choices of a request."""
FINAL = "triton_final_response"
"""The parameter of a response on a stream: whether the request has no more."""


class ChoicePart(NamedTuple):
    """The output of one choice, or what is new of it."""

    text: str
    finish_reason: str
    """Empty if it has not ended."""
    num_tokens: int
    cumulative_logprob: float
    """The sum for all tokens so far."""


class ResponseBuilder:
    """Builds the responses of one served model."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def infer_response(self, request_id: str) -> Any:
        """Returns a ModelInferResponse without outputs."""
        return ModelInferResponse(model_name=self._model_name, model_version=MODEL_VERSION, id=request_id)

    def text_response(self, options: InferOptions, parts: Sequence[ChoicePart], num_input_tokens: int) -> Any:
        """Returns a response with the wanted outputs, each with one element for each choice."""
        response = self.infer_response(options.request_id)
        elements: Mapping[str, Sequence[Any]] = {
            names.TEXT: [options.prefix + part.text for part in parts],
            names.FINISH_REASON: [part.finish_reason for part in parts],
            names.CUMULATIVE_LOGPROB: [part.cumulative_logprob for part in parts],
            names.NUM_INPUT_TOKENS: [num_input_tokens],
            names.NUM_OUTPUT_TOKENS: [part.num_tokens for part in parts],
        }
        outputs = (
            Output(name, datatype, elements[name]) for name, (datatype, _) in OUTPUTS.items() if name in options.outputs
        )
        add_outputs(response, outputs)
        return response

    def whole_response(self, options: InferOptions, complete: pb.CompleteResponse) -> Any:
        """Returns the response with a whole output."""
        parts = [
            ChoicePart(
                choice.text,
                _OWN_REASONS.get(choice.end.reason, ""),
                len(choice.token_ids),
                sum(choice.logprobs.chosen),
            )
            for choice in complete.choices
        ]
        return self.text_response(options, parts, complete.finished.usage.prompt_tokens)


@dataclass(slots=True)
class _StreamedChoice:
    """The output of one choice that is not sent yet, and its sums so far."""

    text: StringIO = field(default_factory=StringIO)
    num_tokens: int = 0
    cumulative_logprob: float = 0.0
    end: StopMatch | None = None

    def add_delta(self, delta: SequenceDelta) -> None:
        self.text.write(delta.text)
        self.num_tokens += len(delta.token_ids)
        if delta.logprobs is not None:
            self.cumulative_logprob += sum(delta.logprobs.chosen)
        self.end = delta.end or self.end

    def take_part(self) -> ChoicePart:
        reason = "" if self.end is None else _REASONS.get(self.end.reason, "")
        part = ChoicePart(self.text.getvalue(), reason, self.num_tokens, self.cumulative_logprob)
        self.text, self.num_tokens = StringIO(), 0
        return part


class _StreamedRequest:
    """A live request of a stream."""

    def __init__(self, options: InferOptions, choices: Sequence[_StreamedChoice]) -> None:
        self.options = options
        self.choices = choices
        self.num_input_tokens = 0

    @property
    def is_complete(self) -> bool:
        """Whether each choice has ended, and not because of a failure."""
        return all(choice.end is not None and choice.end.reason in _REASONS for choice in self.choices)


class StreamEncoder:
    """Builds the messages of one stream, and keeps its live requests by their refs."""

    def __init__(self, builder: ResponseBuilder) -> None:
        self._builder = builder
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
        self._requests[start.ref] = _StreamedRequest(options, [_StreamedChoice() for _ in range(num_choices)])
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
            for delta in deltas:
                self._requests[ref].choices[index].add_delta(delta)
        messages = [self._part(ref) for ref in dict.fromkeys(ref for ref, _ in batch.deltas)]
        messages += [self._failure(refused.ref, refused.status) for refused in batch.frames_refused]
        messages += [self._end(finished) for finished in batch.finished]
        return [message for message in messages if message is not None]

    def _part(self, ref: int) -> Any:
        """Returns the message with what is new; None if it waits for the end, so that the last response of a request
        has outputs."""
        request = self._requests[ref]
        if not request.options.streams or request.is_complete:
            return None
        return self._text_message(request, is_final=False)

    def _end(self, finished: pb.Finished) -> Any:
        if finished.status.code:
            return self._failure(finished.ref, finished.status)
        request = self._removed(finished.ref)
        assert request is not None
        return self._text_message(request, is_final=True)

    def _failure(self, ref: int, status: status_pb2.Status) -> Any:
        request, request_id = self._removed(ref), self._refused_ids.pop(ref, "")
        if request is not None:
            request_id, status = request.options.request_id, renamed_status(status, request.options.field_names)
        response = self._builder.infer_response(request_id)
        response.parameters[FINAL].bool_param = True
        return ModelStreamInferResponse(error_message=status.message, infer_response=response)

    def _text_message(self, request: _StreamedRequest, *, is_final: bool) -> Any:
        parts = [choice.take_part() for choice in request.choices]
        response = self._builder.text_response(request.options, parts, request.num_input_tokens)
        response.parameters[FINAL].bool_param = is_final
        return ModelStreamInferResponse(infer_response=response)

    def _removed(self, ref: int) -> _StreamedRequest | None:
        request = self._requests.pop(ref, None)
        if request is not None:
            self._ids.discard(request.options.request_id)
        return request

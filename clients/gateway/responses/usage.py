"""The common fields of an answer's chunks, and the tokens used so far."""

import time
from collections.abc import Sequence
from dataclasses import replace

from penstock.clients.events import Accepted, Delta, Event, Finished, Usage
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.schemas.common import GenerationBody
from penstock.clients.gateway.upstream.service_link import UpstreamCaller


class UsageTracker:
    """Tracks one HTTP request."""

    def __init__(self, body: GenerationBody, caller: UpstreamCaller, kind: str, id_prefix: str) -> None:
        """``kind``: OpenAI's ``object`` of the chunks."""
        self._is_streamed = bool(body.stream)
        self._in_each_chunk = self._is_streamed and body.includes_usage_so_far
        self._in_last_chunk = self._is_streamed and body.includes_usage
        self._id_prefix = id_prefix
        self._common: Json = {
            "id": "",
            "object": kind,
            "created": int(time.time()),
            "model": caller.model_name,
            "system_fingerprint": f"penstock-{caller.model.version}",
        }
        self._predicted, self._accepted_predicted = 0, 0
        num_received = sum(len(choice.token_ids or ()) for choice in body.received_choices)
        self._so_far, self._finished = Usage(output_tokens=num_received), Usage()
        """The tokens that have arrived so far, and the final numbers of the requests that have finished."""

    def set_request_id(self, request_id: str) -> None:
        """Sets the id, once the service has accepted the request."""
        self._common["id"] = self._id_prefix + request_id

    def count(self, event: Event) -> None:
        match event:
            case Accepted():
                self._so_far.prompt_tokens += event.prompt_tokens
                self._so_far.cached_tokens += event.cached_tokens
            case Delta():
                self._so_far.output_tokens += len(event.token_ids)
            case Finished():
                self._finished.prompt_tokens += event.usage.prompt_tokens
                self._finished.cached_tokens += event.usage.cached_tokens
                self._finished.output_tokens += event.usage.output_tokens
                self._finished.reasoning_tokens += event.usage.reasoning_tokens
                if event.speculation is not None:
                    self._predicted += event.speculation.predicted_tokens
                    self._accepted_predicted += event.speculation.accepted_predicted_tokens

    def chunk(self, choices: Sequence[Json]) -> Json:
        """Returns a chunk with these choices."""
        chunk = {**self._common, "choices": choices}
        if self._in_each_chunk:
            chunk["usage"] = _usage(self._so_far)
        elif self._in_last_chunk:
            chunk["usage"] = None
        return chunk

    @property
    def shows_usage_so_far(self) -> bool:
        """Whether each chunk has the tokens used so far."""
        return self._in_each_chunk

    def last_chunk(
        self, *, without_output: bool = False, shows_reasoning: bool = False, shows_prediction: bool = False
    ) -> list[Json]:
        """Returns the chunk with the usage, if requested. ``without_output``: no output was requested.
        ``shows_reasoning``: whether the usage has the number of reasoning tokens. ``shows_prediction``: whether it has
        those of the prediction."""
        if self._is_streamed and not self._in_last_chunk:
            return []
        usage = _usage(replace(self._finished, output_tokens=0) if without_output else self._finished)
        details = {"reasoning_tokens": self._finished.reasoning_tokens} if shows_reasoning else {}
        if shows_prediction:
            details |= {
                "accepted_prediction_tokens": self._accepted_predicted,
                "rejected_prediction_tokens": self._predicted - self._accepted_predicted,
            }
        if details:
            usage["completion_tokens_details"] = details
        return [{**self._common, "choices": [], "usage": usage}]


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }

"""The events of a request's stream as types, and all of them together as a ``Completion``."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TypeVar

import penstock.v1 as pb
from penstock.clients.errors import RequestFailed, failure_from_status
from penstock.clients.output import CalledTool, Logprobs, ToolCallPart, append_parts, whole_calls


class FinishReason(Enum):
    """Why output ended. Batch files contain these values."""

    UNSPECIFIED = "unspecified"
    """Not ended, or ended before any output."""
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """Stopped after parsed tool calls, all of which are complete."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


_REASONS = {pb.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason}


@dataclass(slots=True)
class Usage:
    """The tokens used. Stop tokens and the tokens of stop strings count as output."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    """The output's tokens that are reasoning; 0 unless it is parsed."""


@dataclass(slots=True)
class Timings:
    """When each phase of a request ended, in milliseconds since its arrival at the service."""

    queued_ms: float = 0.0
    prefill_ms: float = 0.0
    first_token_ms: float = 0.0
    total_ms: float = 0.0
    preemptions: int = 0
    """How often the request lost its KV cache to others."""
    restarts: int = 0
    """How often the service's worker died during the request."""


_Counts = TypeVar("_Counts", Usage, Timings)


def _copied(kind: type[_Counts], message: pb.Usage | pb.Timings) -> _Counts:
    """Copies a message whose fields have the same names."""
    return kind(**{each.name: getattr(message, each.name) for each in fields(kind)})


@dataclass(slots=True)
class Accepted:
    """The request is in the queue."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    """An estimate; ``Usage`` has the actual number."""
    queue_position: int
    predicted_ttft_ms: int | None = None
    client_request_id: str = ""
    resume_ticket: bytes = b""
    """What another replica needs to continue the request; a client with several targets sends it by itself."""

    @classmethod
    def from_proto(cls, message: pb.Accepted) -> "Accepted":
        return cls(
            request_id=message.request_id,
            prompt_tokens=message.prompt_tokens,
            cached_tokens=message.cached_tokens,
            queue_position=message.queue_position,
            predicted_ttft_ms=message.predicted_ttft_ms if message.HasField("predicted_ttft_ms") else None,
            client_request_id=message.client_request_id,
            resume_ticket=message.resume_ticket,
        )


@dataclass(slots=True)
class PromptLogprobs:
    """The log-probabilities of the prompt's tokens from position ``start`` on."""

    start: int
    logprobs: Logprobs

    @classmethod
    def from_proto(cls, message: pb.PromptLogprobs) -> "PromptLogprobs":
        return cls(message.start, Logprobs.from_proto(message.logprobs))


@dataclass(slots=True)
class ChoiceEnd:
    """Why a choice ended, and the stop that matched, if any."""

    reason: FinishReason
    stop: str | None = None
    stop_token_id: int | None = None

    @classmethod
    def from_proto(cls, message: pb.ChoiceEnd) -> "ChoiceEnd":
        matched = message.WhichOneof("matched")
        return cls(
            reason=_REASONS.get(message.reason, FinishReason.UNSPECIFIED),
            stop=message.stop if matched == "stop" else None,
            stop_token_id=message.stop_token_id if matched == "stop_token_id" else None,
        )


@dataclass(slots=True)
class Delta:
    """New output of one choice: whole characters, and exactly their tokens. One token or several. The last delta also
    has the tokens that ended the choice. ``text`` has no reasoning and no tool calls if the request has these
    parsed."""

    text: str
    token_ids: list[int]
    choice: int = 0
    logprobs: Logprobs | None = None
    end: ChoiceEnd | None = None
    """Set on a choice's last delta."""
    reasoning: str = ""
    tool_calls: list[ToolCallPart] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Whether it adds only text and tokens."""
        return self.logprobs is None and self.end is None and not self.reasoning and not self.tool_calls

    @classmethod
    def from_proto(cls, message: pb.Delta) -> "Delta":
        return cls(
            text=message.text,
            token_ids=message.token_ids[:],
            choice=message.choice,
            logprobs=Logprobs.from_proto(message.logprobs) if message.HasField("logprobs") else None,
            end=ChoiceEnd.from_proto(message.end) if message.HasField("end") else None,
            reasoning=message.reasoning,
            tool_calls=[ToolCallPart.from_proto(call) for call in message.tool_calls],
        )


@dataclass(slots=True)
class Speculation:
    """The statistics of a request's drafts, tokens that were guessed and then verified."""

    drafted_tokens: int
    accepted_tokens: int
    """Drafted tokens that were accepted."""
    steps: int
    """Steps with drafts. Each produced 1 token more than it had accepted drafts."""
    drafted_at: list[int]
    """Entry i: steps with i + 1 drafts or more."""
    accepted_at: list[int]
    """Entry i: steps with i + 1 accepted drafts or more."""
    predicted_tokens: int = 0
    """Drafted tokens that came from the request's prediction."""
    accepted_predicted_tokens: int = 0

    @property
    def mean_length(self) -> float:
        """The mean number of tokens from a step with drafts."""
        return 1 + self.accepted_tokens / self.steps

    @classmethod
    def from_proto(cls, message: pb.Speculation) -> "Speculation":
        at = message.drafted_at[:], message.accepted_at[:]
        predicted = message.predicted_tokens, message.accepted_predicted_tokens
        return cls(message.drafted_tokens, message.accepted_tokens, message.steps, *at, *predicted)


@dataclass(slots=True)
class Finished:
    """The end of a request, its last event."""

    reason: FinishReason
    usage: Usage
    timings: Timings
    request_id: str = ""
    seed: int | None = None
    """The seed used for sampling. The same request with this seed repeats the output if the service can."""
    may_continue: bool = False
    """Whether ``continue_from`` may refer to this request."""
    speculation: Speculation | None = None
    """None if the request had no drafts."""
    superseded: bool = False
    """Whether another request replaced this one; see ``RequestStream.supersede``."""

    @classmethod
    def from_proto(cls, message: pb.Finished) -> "Finished":
        """Copies a message of the contract, except its status, which ``errors`` reads."""
        return cls(
            reason=_REASONS.get(message.reason, FinishReason.UNSPECIFIED),
            usage=_copied(Usage, message.usage),
            timings=_copied(Timings, message.timings),
            request_id=message.request_id,
            seed=message.seed if message.HasField("seed") else None,
            may_continue=message.may_continue,
            speculation=Speculation.from_proto(message.speculation) if message.HasField("speculation") else None,
            superseded=bool(message.superseded_by),
        )


@dataclass(slots=True)
class FrameRefused:
    """An update, an append or a commit was refused; the request continues unchanged."""

    failure: RequestFailed
    """The reason. It is not raised."""
    frame: str = ""
    """``update``, ``append`` or ``commit``."""
    append_id: int = 0
    """The number that ``append`` returned; 0 for other frames."""

    @classmethod
    def from_proto(cls, message: pb.FrameRefused) -> "FrameRefused":
        name = pb.FrameKind.Name(message.frame).removeprefix("FRAME_KIND_").lower()
        return cls(failure_from_status(message.status), name, message.append_id)


@dataclass(slots=True)
class Injected:
    """Appended tokens are in the output, after the deltas so far."""

    output_tokens: int
    """The number of output tokens before them."""
    injected_tokens: int
    append_ids: list[int] = field(default_factory=list)
    """The number that ``append`` returned for each of them."""

    @classmethod
    def from_proto(cls, message: pb.Injected) -> "Injected":
        return cls(message.output_tokens, message.injected_tokens, message.append_ids[:])


Event = Accepted | PromptLogprobs | Delta | FrameRefused | Injected | Finished


@dataclass(slots=True)
class Choice:
    """One whole answer among ``n``."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    end: ChoiceEnd = field(default_factory=lambda: ChoiceEnd(FinishReason.UNSPECIFIED))
    reasoning: str = ""
    tool_calls: list[CalledTool] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason:
        return self.end.reason


@dataclass(slots=True)
class Completion:
    """The whole answer to one request. ``text``, ``reasoning``, ``tool_calls``, ``token_ids``, ``logprobs`` and
    ``finish_reason`` are those of the first choice, the only one unless ``n`` was given. The other properties are those
    of ``finished``."""

    choices: list[Choice]
    finished: Finished
    prompt_logprobs: Logprobs | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> list[CalledTool]:
        return self.choices[0].tool_calls

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> Logprobs | None:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def usage(self) -> Usage:
        return self.finished.usage

    @property
    def speculation(self) -> Speculation | None:
        return self.finished.speculation

    @property
    def timings(self) -> Timings:
        return self.finished.timings

    @property
    def request_id(self) -> str:
        return self.finished.request_id


def collect(events: Iterable[Event], num_choices: int) -> Completion:
    """Combines the events of one successful request; the last one is its ``Finished``."""
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    reasoning: list[list[str]] = [[] for _ in range(num_choices)]
    calls: list[list[ToolCallPart]] = [[] for _ in range(num_choices)]
    choices = [Choice() for _ in range(num_choices)]
    prompt_logprobs: Logprobs | None = None
    finished: Finished | None = None
    for event in events:
        match event:
            case Delta():
                choice = choices[event.choice]
                texts[event.choice].append(event.text)
                reasoning[event.choice].append(event.reasoning)
                calls[event.choice] += event.tool_calls
                choice.token_ids += event.token_ids
                if event.logprobs is not None:
                    choice.logprobs = choice.logprobs or Logprobs()
                    choice.logprobs.extend(event.logprobs)
                if event.end is not None:
                    choice.end = event.end
            case PromptLogprobs():
                prompt_logprobs = prompt_logprobs or Logprobs()
                prompt_logprobs.extend(event.logprobs)
            case Finished():
                finished = event
    assert finished is not None, "events of a request that has not ended"
    for index, choice in enumerate(choices):
        choice.text, choice.reasoning = "".join(texts[index]), "".join(reasoning[index])
        choice.tool_calls = whole_calls(calls[index])
    return Completion(choices, finished, prompt_logprobs)


def merge(events: Iterable[Event]) -> list[Event]:
    """Merges events: the deltas of a choice between two injections become one, and so do all parts of the prompt's
    log-probabilities. Nothing is lost; the order within a choice is kept."""
    merged: list[Event] = []
    deltas: dict[int, Delta] = {}
    prompt: PromptLogprobs | None = None
    for event in events:
        if isinstance(event, Delta) and event.choice in deltas:
            _append(deltas[event.choice], event)
        elif isinstance(event, PromptLogprobs) and prompt is not None:
            prompt.logprobs.extend(event.logprobs)
        else:
            if isinstance(event, Injected):
                deltas.clear()
            merged.append(event)
            if isinstance(event, Delta):
                deltas[event.choice] = event
            elif isinstance(event, PromptLogprobs):
                prompt = event
    return merged


def _append(delta: Delta, more: Delta) -> None:
    delta.text += more.text
    delta.reasoning += more.reasoning
    append_parts(delta.tool_calls, more.tool_calls)
    delta.token_ids += more.token_ids
    if more.logprobs is not None:
        delta.logprobs = delta.logprobs or Logprobs()
        delta.logprobs.extend(more.logprobs)
    delta.end = more.end or delta.end

"""The requests that the service passes to the engine, and the events that it gets back. Everything slow (tokens,
hashes, text state) is prepared before. This module does not depend on gRPC or tokenizers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple, Protocol

from penstock.scheduler.adapters import Adapter
from penstock.scheduler.plan import Pooling, SamplingParams, TokenLogprobs


class EngineFinishReason(Enum):
    """Why a sequence or a request ended."""

    STOP = auto()
    LENGTH = auto()
    CANCELLED = auto()
    SUPERSEDED = auto()
    """Another request of the same caller replaced it."""
    DEADLINE = auto()
    WORKER_DIED = auto()
    SHUTDOWN = auto()
    KILLED_WORKER = auto()
    """It crashed the worker twice while it ran alone."""
    GRAMMAR = auto()
    """Its grammar became too costly to match."""
    DEAD_END = auto()
    """Its grammar allowed a beginning that has no continuation."""
    SLOW_CONSTRAINT = auto()
    """Its grammar took too long to match, token after token."""
    ADAPTER_FAILED = auto()
    """Its LoRA adapter could not be loaded again."""
    INTERNAL = auto()


class RefusalKind(Enum):
    """Why a request did not enter the queue."""

    QUEUE_FULL = auto()
    TOO_LARGE = auto()
    """It can never fit in the KV cache, even when it runs alone."""
    DRAINING = auto()
    WORKER_DOWN = auto()
    DEADLINE = auto()
    """Its deadline passed before admission."""
    OVERLOADED = auto()
    """Its deadline would pass before its predicted end."""
    TENANT_BUSY = auto()
    """Its tenant has the maximum number of live requests."""
    TENANT_RATE = auto()
    """Its tenant exceeds its rate of requests."""
    TENANT_TOKENS = auto()
    """Its tenant has used up its token budget for now."""
    TENANT_CAP = auto()
    """It exceeds a cap of its tenant. Trying again cannot help."""
    CONTEXT_LENGTH = auto()
    """Injected tokens would leave no room in the context for an output token."""
    NOT_INJECTABLE = auto()
    """A request with several sequences, without output or with a grammar takes no injected tokens."""


class Refused(Exception):
    """Raised for a request that was not admitted. ``retry_after_ms`` is None if trying again cannot help."""

    def __init__(self, kind: RefusalKind, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_ms = retry_after_ms


class TextDelta(NamedTuple):
    """The output that a text state releases after a token."""

    num_tokens: int
    """The number of the oldest held tokens that are released with ``text``."""
    text: str
    stop: str | None = None
    """The stop string that was matched. ``text`` ends before it, and no more tokens may be fed."""
    lengths: tuple[int, ...] | None = None
    """The number of characters of the text that begin in each token, unless there is only one token. After a stop
    string the tokens of the stop string may be included, with all their characters."""

    def text_lengths(self) -> tuple[int, ...]:
        """Returns ``lengths``, also for a single token."""
        if self.lengths is not None:
            return self.lengths
        return (len(self.text),) if self.num_tokens else ()


class TextState(Protocol):
    """Turns one sequence's tokens into text: whole characters, never a possible beginning of a stop string."""

    def feed(self, token_id: int) -> TextDelta:
        """Adds one output token that is not a stop token."""

    def finish(self) -> TextDelta:
        """Releases all that is held, after the sequence ended for another reason than a stop string."""

    def restart(self) -> None:
        """Begins a text of its own, after ``finish``: tokens were injected."""


class StopMatch(NamedTuple):
    """How a sequence ended, and the match if it stopped."""

    reason: EngineFinishReason
    stop: str | None = None
    stop_token_id: int | None = None


class ResumedSequence(NamedTuple):
    """What another engine has already chosen of a sequence."""

    token_ids: list[int]
    block_hashes: list[bytes]
    """Hashes of the full blocks of the prompt and these tokens."""
    output: object
    """The ``OutputBuffer`` that has taken these tokens. The sequence continues it."""


@dataclass(slots=True)
class RequestAccepted:
    """The request is in the queue."""

    cached_tokens: int
    queue_position: int
    predicted_ttft_s: float | None = None
    """The predicted time from now to the first token; None while the times of steps are unknown."""


@dataclass(slots=True)
class PromptLogprobsChunk:
    """A part of the prompt's log-probabilities, in order and without gaps; ``start`` is a position in the prompt."""

    start: int
    token_ids: Sequence[int]
    logprobs: TokenLogprobs


@dataclass(slots=True)
class SequenceDelta:
    """New output of one sequence: exactly the tokens of ``text``, and with ``end`` those that ended it."""

    choice: int
    token_ids: list[int]
    text: str
    logprobs: TokenLogprobs | None = None
    end: StopMatch | None = None
    text_lengths: list[int] | None = None
    """The characters of the text that begin in each token, if there are ``logprobs`` or the request measures text."""


@dataclass(slots=True)
class TokensInjected:
    """Injected tokens are in the history of the only sequence, after this many output tokens."""

    num_output_tokens: int
    num_tokens: int


@dataclass(slots=True)
class Embedded:
    """The vector of one prompt of a pooled request. The sequence with this number has ended."""

    choice: int
    vector: bytes
    """The same bytes as ``RowResult.vector``."""


@dataclass(slots=True)
class TokenUsage:
    """Tokens used so far. Stop tokens and the tokens of stop strings count as output, injected tokens as prompt."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class RequestTimings:
    """Microseconds from arrival, as defined in the proto."""

    queued_us: int = 0
    prefill_us: int = 0
    first_token_us: int = 0
    total_us: int = 0
    preemptions: int = 0
    restarts: int = 0
    """Restarts of the worker while the request ran."""


@dataclass(slots=True)
class SpeculationCounts:
    """Counts of a request's drafts."""

    steps: int = 0
    """Steps with drafts."""
    predicted: int = 0
    """Drafts from the request's prediction."""
    accepted_predicted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    """Entry i counts the steps in which at least i + 1 drafts were computed. The sum is the number of drafts."""
    accepted_at: list[int] = field(default_factory=list)
    """The same for accepted drafts."""

    @property
    def drafted(self) -> int:
        return sum(self.drafted_at)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_at)

    def count_step(self, num_drafted: int, num_accepted: int, is_predicted: bool = False) -> None:
        """Counts one row's drafts in one step. ``is_predicted`` is whether they come from its prediction."""
        self.steps += 1
        if is_predicted:
            self.predicted += num_drafted
            self.accepted_predicted += num_accepted
        for counts, number in ((self.drafted_at, num_drafted), (self.accepted_at, num_accepted)):
            counts += [0] * (number - len(counts))
            for index in range(number):
                counts[index] += 1


@dataclass(slots=True, frozen=True)
class Context:
    """The context of a request that ended, for requests that continue it."""

    token_ids: list[int]
    """Its prompt, and the output that its caller received."""
    block_hashes: list[bytes]
    """Hashes of full blocks from the first one on, as many as were needed so far; empty with the cache off."""


@dataclass(slots=True)
class RequestFinished:
    """The end of a request: its last event, exactly once."""

    reason: EngineFinishReason
    usage: TokenUsage
    timings: RequestTimings
    message: str = ""
    """The error, written for the caller; empty if there was none."""
    context: Context | None = None
    """Set for a request of one sequence that began and then stopped, reached its length or was cancelled."""
    speculation: SpeculationCounts | None = None
    """None: it had no drafts."""


Event = RequestAccepted | PromptLogprobsChunk | SequenceDelta | TokensInjected | Embedded | RequestFinished


@dataclass(slots=True, frozen=True)
class Change:
    """Changes that the caller of a live request makes. None means no change."""

    priority: int | None = None
    deadline: float | None = None
    """A time by ``time.monotonic()``."""
    max_tokens: int | None = None
    """The limit of each sequence; at least 1."""


class Prompt(NamedTuple):
    """A prompt that is ready for the queue."""

    token_ids: list[int]
    block_hashes: list[bytes]
    """Chained hashes of its full blocks, salted by tenant (``kv.block_hash``)."""


@dataclass(slots=True, eq=False)
class Request:
    """One request, prepared. The engine never changes these fields."""

    request_id: str
    prompt_token_ids: list[int]
    """1 to max_model_len - 1 ids; one more if it is pooled."""
    block_hashes: list[bytes]
    """The same as ``Prompt.block_hashes``."""
    sampling: SamplingParams
    """``seed`` is set; sequence i of n uses a seed derived from it."""
    max_tokens: int
    """Output tokens of each sequence. Prompt and output together fit in max_model_len."""
    sink: Callable[[Event], None]
    """Called on the event loop, synchronously, in order; must not raise or block."""
    make_text: Callable[[], TextState]
    """Returns a new text state; called once per sequence."""
    n: int = 1
    tenant: str = "default"
    priority: int = 0
    """Under the policy ``priority``, a lower value runs first."""
    deadline: float | None = None
    """A time by ``time.monotonic()``."""
    retain_s: float = 0.0
    """The time after its end for which its KV is kept in preference to ordinary cache."""
    max_tokens_is_default: bool = False
    """The caller did not set ``max_tokens``: its tenant's cap lowers it instead of refusing the request."""
    client_request_id: str = ""
    """The caller's own id, which the request's timeline contains."""
    session_id: str = ""
    """The conversation that it belongs to, named by its caller; empty: none."""
    first_token_target: float | None = None
    """When its first token should come at the latest, by ``time.monotonic()``. Requests with earlier targets run first
    among those with the same priority; a missed target does not end the request."""
    target_itl_s: float | None = None
    """The target time between its tokens; None: that of the scheduler."""
    arrival: float = 0.0
    """A time by ``time.monotonic()``."""
    hash_salt: bytes = b""
    """The salt of the block hashes, which output blocks need too."""
    adapter: Adapter | None = None
    """The LoRA adapter that its rows are computed with; None: the base model. ``hash_salt`` includes it."""
    pooling: Pooling | None = None
    """If set, each of its prompts is a sequence that brings one ``Embedded``, and no output: ``max_tokens`` is 0."""
    max_drafts: int = 0
    """The maximum number of drafts of a sequence in a step."""
    prediction: list[int] = field(default_factory=list)
    """The output that the caller expects, to draft from; empty if it expects none."""
    grammar: str = ""
    """The same as ``AddedRow.grammar``."""
    grammar_end_ids: frozenset[int] = frozenset()
    """Tokens that end an output that matches ``grammar``. Before ``min_tokens``, one comes only where the grammar
    allows nothing else, and ends the output there too."""
    supersedes: str = ""
    """The id of a live request of the same tenant that ends when this one enters the queue. Ignored if it has ended."""
    is_warm_up: bool = False
    """Only its KV matters, for a later request. It counts neither as its tenant's live request nor in totals."""
    num_paid_tokens: int = 0
    """Tokens of its prompts that are not charged to its tenant's token rate, because they were charged before."""
    measures_text: bool = False
    """Whether its deltas have ``text_lengths`` without log-probabilities too."""
    resumed: Sequence[ResumedSequence] = ()
    """The beginning of each sequence, if the request continues one of another engine: it is in the history, but no
    event reports it. ``max_tokens``, the usage and everything that counts output includes it."""
    more_prompts: Sequence[Prompt] = ()
    """The prompts after the first, if it is pooled: ``n`` counts them all."""
    num_prompt_tokens: int = field(init=False)
    """Tokens of all prompts, counted once because there may be thousands."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids) + sum(len(prompt.token_ids) for prompt in self.more_prompts)

    @property
    def num_queued_tokens(self) -> int:
        """The number of tokens for which the queue needs room."""
        return self.num_prompt_tokens + len(self.prediction) + self.num_resumed_tokens

    @property
    def num_resumed_tokens(self) -> int:
        """The number of output tokens that another engine has chosen."""
        return sum(len(sequence.token_ids) for sequence in self.resumed)

    def prompt(self, choice: int) -> Prompt:
        if choice and self.more_prompts:
            return self.more_prompts[choice - 1]
        return Prompt(self.prompt_token_ids, self.block_hashes)

    def first_hashes(self, choice: int) -> Sequence[bytes]:
        """Returns the hashes of the full blocks with which a sequence enters the queue."""
        return self.resumed[choice].block_hashes if self.resumed else self.prompt(choice).block_hashes

    @property
    def num_charged_tokens(self) -> int:
        """The tokens of its prompts, and of the output that it continues, that are charged to its tenant's token
        rate."""
        return self.num_prompt_tokens - self.num_paid_tokens + self.num_resumed_tokens

    @property
    def num_prompts(self) -> int:
        """The number of prompts to compute. Sequences that only sample differently share one."""
        return 1 + len(self.more_prompts)

    @property
    def num_entering(self) -> int:
        """The number of sequences that enter the queue with the request. The others are forked later."""
        return self.n if self.resumed else self.num_prompts

    @property
    def longest_prompt(self) -> int:
        return max(len(self.prompt_token_ids), max((len(prompt.token_ids) for prompt in self.more_prompts), default=0))

    @property
    def reads_cache(self) -> bool:
        """Whether its result can be computed without computing a cached prefix again."""
        if self.pooling is not None:
            return self.pooling.reads_cache
        return self.sampling.prompt_logprobs is None

    def changed(self, change: Change) -> "Request":
        return replace(
            self,
            priority=self.priority if change.priority is None else change.priority,
            deadline=self.deadline if change.deadline is None else change.deadline,
            max_tokens=self.max_tokens if change.max_tokens is None else change.max_tokens,
            max_tokens_is_default=self.max_tokens_is_default and change.max_tokens is None,
        )

"""What the service hands to the engine, and what it gets back. Everything slow (tokens, hashes, text state) is prepared
before a request gets here; nothing here knows gRPC or tokenizers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple, Protocol

from penstock.scheduler.plan import Pooling, SamplingParams, TokenLogprobs


class EngineFinishReason(Enum):
    """Why a choice or a request ended."""

    STOP = auto()
    LENGTH = auto()
    CANCELLED = auto()
    DEADLINE = auto()
    WORKER_DIED = auto()
    SHUTDOWN = auto()
    KILLED_WORKER = auto()
    """It ended the worker twice while it ran alone."""
    GRAMMAR = auto()
    """What its output must match became too costly to follow."""
    DEAD_END = auto()
    """What its output must match allowed a beginning that nothing can follow."""
    SLOW_CONSTRAINT = auto()
    """Its constraint took too long to follow, token after token."""
    INTERNAL = auto()


class RefusalKind(Enum):
    """Why a request never entered the queue."""

    QUEUE_FULL = auto()
    TOO_LARGE = auto()
    """It can never fit in the KV cache, even alone."""
    DRAINING = auto()
    WORKER_DOWN = auto()
    DEADLINE = auto()
    """Its deadline passed before admission."""
    OVERLOADED = auto()
    """By the time that it would be done its deadline would have passed."""
    TENANT_BUSY = auto()
    """Its tenant has as many live requests as it may have."""
    TENANT_RATE = auto()
    """Its tenant sends requests faster than it may."""
    TENANT_TOKENS = auto()
    """Its tenant has used up the tokens that it may have for now."""
    TENANT_CAP = auto()
    """It asks for more than its tenant may: trying again cannot help."""


class Refused(Exception):
    """A request that was not admitted. ``retry_after_ms`` is None where trying again cannot help."""

    def __init__(self, kind: RefusalKind, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_ms = retry_after_ms


class TextDelta(NamedTuple):
    """What a text state lets go after a token."""

    num_tokens: int
    """How many of the oldest tokens held by the text state are released with ``text``."""
    text: str
    stop: str | None = None
    """The stop string that was matched; ``text`` ends before it and nothing more may be fed."""
    lengths: tuple[int, ...] | None = None
    """How many characters of the text begin in each token, where that is not one token alone. After a stop string there
    may be more: those of its own tokens, in full."""

    def text_lengths(self) -> tuple[int, ...]:
        """``lengths``, also of one token."""
        if self.lengths is not None:
            return self.lengths
        return (len(self.text),) if self.num_tokens else ()


class TextState(Protocol):
    """Turns one choice's tokens into text: whole characters, never a possible beginning of a stop string."""

    def feed(self, token_id: int) -> TextDelta:
        """Takes one output token that is not a stopping token."""
        ...

    def finish(self) -> TextDelta:
        """The choice ended for another reason than a stop string: releases all that is held."""
        ...


class StopMatch(NamedTuple):
    """How a choice ended, and what was matched if it stopped."""

    reason: EngineFinishReason
    stop: str | None = None
    stop_token_id: int | None = None


@dataclass(slots=True)
class RequestAccepted:
    """The request is in the queue."""

    cached_tokens: int
    queue_position: int
    predicted_ttft_s: float | None = None
    """From now to the first token; None while nothing is known of the time that steps take."""


@dataclass(slots=True)
class PromptLogprobsChunk:
    """A part of the prompt's log-probabilities, in order and without gaps; ``start`` is a position in the prompt."""

    start: int
    logprobs: TokenLogprobs


@dataclass(slots=True)
class SequenceDelta:
    """New output of one choice: exactly the tokens of ``text``, and with ``end`` those that ended it."""

    choice: int
    token_ids: list[int]
    text: str
    logprobs: TokenLogprobs | None = None
    end: StopMatch | None = None
    text_lengths: list[int] | None = None
    """How many characters of the text begin in each token, where there are ``logprobs``."""


@dataclass(slots=True)
class Embedded:
    """The vector of one prompt of a request that is pooled; with it the choice of that number has ended."""

    choice: int
    vector: bytes
    """As ``RowResult.vector``."""


@dataclass(slots=True)
class TokenUsage:
    """Tokens used so far; stopping tokens and those of stop strings count as output."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class RequestTimings:
    """Microseconds from arrival, as the proto has them."""

    queued_us: int = 0
    prefill_us: int = 0
    first_token_us: int = 0
    total_us: int = 0
    preemptions: int = 0
    restarts: int = 0
    """Of the worker, while it ran."""


@dataclass(slots=True)
class SpeculationCounts:
    """What became of a request's drafts."""

    steps: int = 0
    """That had some."""
    drafted_at: list[int] = field(default_factory=list)
    """Entry i: steps whose first i + 1 drafts or more were computed; its sum is the number of drafts."""
    accepted_at: list[int] = field(default_factory=list)
    """The same, of those that were chosen."""

    @property
    def drafted(self) -> int:
        """Tokens."""
        return sum(self.drafted_at)

    @property
    def accepted(self) -> int:
        """Tokens."""
        return sum(self.accepted_at)

    def count_step(self, num_drafted: int, num_accepted: int) -> None:
        """Of one row in one step."""
        self.steps += 1
        for counts, number in ((self.drafted_at, num_drafted), (self.accepted_at, num_accepted)):
            counts += [0] * (number - len(counts))
            for index in range(number):
                counts[index] += 1

    def copy(self) -> "SpeculationCounts":
        """As it is now."""
        return SpeculationCounts(self.steps, self.drafted_at.copy(), self.accepted_at.copy())


@dataclass(slots=True, frozen=True)
class Context:
    """What a request that ended leaves to those that continue it."""

    token_ids: list[int]
    """Its prompt and the output that its caller was given."""
    block_hashes: list[bytes]
    """Of full blocks from the first one on, as many as were needed so far; none with the cache off."""


@dataclass(slots=True)
class RequestFinished:
    """The end of a request: exactly one, last."""

    reason: EngineFinishReason
    usage: TokenUsage
    timings: RequestTimings
    message: str = ""
    """What went wrong, fit for the caller's eyes; empty when nothing did."""
    context: Context | None = None
    """Of a request of one choice that began and then stopped, reached its length or was cancelled."""
    speculation: SpeculationCounts | None = None
    """None: it had no drafts."""


Event = RequestAccepted | PromptLogprobsChunk | SequenceDelta | Embedded | RequestFinished


@dataclass(slots=True, frozen=True)
class Change:
    """What the caller of a live request wants otherwise; None leaves it as it is."""

    priority: int | None = None
    deadline: float | None = None
    """By ``time.monotonic()``."""
    max_tokens: int | None = None
    """Of each choice; at least 1."""


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
    """1 to max_model_len - 1 ids; one more where it is pooled."""
    block_hashes: list[bytes]
    """As ``Prompt`` has them."""
    sampling: SamplingParams
    """``seed`` is set; choice i of n uses one derived from it."""
    max_tokens: int
    """Output tokens of each choice; prompt and output together fit in max_model_len."""
    sink: Callable[[Event], None]
    """Called on the event loop, synchronously, in order; must not raise or block."""
    make_text: Callable[[], TextState]
    """A new text state; called once for each choice."""
    n: int = 1
    tenant: str = "default"
    priority: int = 0
    """Lower runs first, under the policy ``priority``."""
    deadline: float | None = None
    """By ``time.monotonic()``."""
    retain_s: float = 0.0
    """How long after its end its KV is kept in preference to ordinary cache."""
    max_tokens_is_default: bool = False
    """Nobody asked for so many: its tenant's cap lowers it instead of refusing the request."""
    client_request_id: str = ""
    """The caller's own; told to whoever asks what became of the request."""
    arrival: float = 0.0
    """By ``time.monotonic()``."""
    hash_salt: bytes = b""
    """What the block hashes were salted with: output blocks are hashed on with it."""
    pooling: Pooling | None = None
    """Its prompts are embedded: each is a choice's own and brings one ``Embedded``, and there is no output
    (``max_tokens`` is 0)."""
    max_drafts: int = 0
    """Tokens that may be drafted for a choice in a step."""
    grammar: str = ""
    """As ``AddedRow.grammar``."""
    grammar_end_ids: frozenset[int] = frozenset()
    """Tokens that end an output which matches ``grammar``. Before ``min_tokens`` one comes only where the grammar
    allows nothing else, and ends the output there too."""
    more_prompts: Sequence[Prompt] = ()
    """Those after the first, where it is pooled: ``n`` counts them all."""
    num_prompt_tokens: int = field(init=False)
    """Of all prompts: counted once, since there may be thousands."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids) + sum(len(prompt.token_ids) for prompt in self.more_prompts)

    def prompt(self, choice: int) -> Prompt:
        """What a choice begins with."""
        if choice and self.more_prompts:
            return self.more_prompts[choice - 1]
        return Prompt(self.prompt_token_ids, self.block_hashes)

    @property
    def num_prompts(self) -> int:
        """How many are computed; choices that only sample differently have one together."""
        return 1 + len(self.more_prompts)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest one."""
        return max(len(self.prompt_token_ids), max((len(prompt.token_ids) for prompt in self.more_prompts), default=0))

    @property
    def reads_cache(self) -> bool:
        """Whether what is asked of its prompts can do without computing a prefix that is cached."""
        if self.pooling is not None:
            return self.pooling.reads_cache
        return self.sampling.prompt_logprobs is None

    def changed(self, change: Change) -> "Request":
        """The same request as its caller wants it now."""
        return replace(
            self,
            priority=self.priority if change.priority is None else change.priority,
            deadline=self.deadline if change.deadline is None else change.deadline,
            max_tokens=self.max_tokens if change.max_tokens is None else change.max_tokens,
            max_tokens_is_default=self.max_tokens_is_default and change.max_tokens is None,
        )

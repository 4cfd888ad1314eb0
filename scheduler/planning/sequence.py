"""The state of a live request, and of each of its sequences. Decides nothing.

A sequence's progress, in positions of its history:

    0 .............. num_computed ........ num_planned .......... len(token_ids) .......... length_bound
    |  KV confirmed  |  KV in a plan that  |  not planned yet      |  at most what plans     |
    |                |  has no result yet  |  (prompt chunks)      |  in flight will add     |

For a decoding sequence, every known position is planned. Only the worker knows where the row's history ends, between
``len(token_ids)`` and ``length_bound``.
"""

import hashlib
from collections import deque
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto

import msgspec

from penstock.kv.events import BlockOrigin
from penstock.kv.window_blocks import WindowTable
from penstock.scheduler.plan import Decode, PromptLogprobsPart, SamplingParams
from penstock.scheduler.planning.output_buffer import OutputBuffer, new_output
from penstock.scheduler.planning.tenants import TenantUse
from penstock.scheduler.policy import Place, Rank
from penstock.scheduler.repetition import Repetition
from penstock.scheduler.request import (
    Context,
    EngineFinishReason,
    PromptLogprobsChunk,
    Request,
    RequestFinished,
    RequestTimings,
    SpeculationCounts,
    TextState,
    TokenUsage,
)
from penstock.scheduler.timeline import Timeline
from penstock.scheduler.timing.queued_work import NO_WORK, QueuedWork

_CONTINUABLE = frozenset(
    {
        EngineFinishReason.STOP,
        EngineFinishReason.LENGTH,
        EngineFinishReason.CANCELLED,
        EngineFinishReason.SUPERSEDED,
    }
)


class SequenceStatus(Enum):
    """The status of a sequence."""

    WAITING = auto()
    """In the queue: new, forked or preempted. It holds no row."""
    PREFILLING = auto()
    """Has a row and all blocks of its history; chunks of it are still to be planned."""
    DECODING = auto()
    """Has a row that continues token by token, or a pooled one that waits for its last result."""
    ENDED = auto()


class RequestState:
    """A request from admission to its only ``RequestFinished``."""

    def __init__(
        self, request: Request, number: int, texts: list[TextState], tenant: TenantUse, timeline: Timeline
    ) -> None:
        self.request = request
        """The request, with all changes that its caller has made."""
        self.number = number
        """The arrival number."""
        self.place = Place(0.0, number)
        """Its place among those of the same rank by policy; see ``RequestIntake``."""
        self.tenant = tenant
        adapter = "" if request.adapter is None else request.adapter.name
        self.origin = BlockOrigin(request.tenant, request.session_id, adapter)
        self.timeline = timeline
        self.held = False
        """If true, its output is not read, so it is in no plan."""
        self.sequences: list[SequenceState] = []
        """Only sequence 0, until the prompt is computed."""
        self.texts = texts
        """The text states of the sequences. They are made at admission, where an error affects only this request."""
        self.entered_at = 0.0
        """The time of admission."""
        self.expected_ttft_s: float | None = None
        """The predicted time from admission to the first token; None if there was no prediction."""
        self.expected_s: float | None = None
        """The predicted time from admission to the last token; None if it no longer depends only on the load."""
        self.work = NO_WORK
        """The work, at admission, until it can decode."""
        self.forked = request.n == 1 or request.pooling is not None or bool(request.resumed)
        self.num_ended = 0
        self.num_prompt_logprobs = 1
        """Positions of the prompt whose log-probabilities are reported. The first token has none."""
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.usage = TokenUsage(prompt_tokens=request.num_prompt_tokens)
        self.timings = RequestTimings()
        self.speculation = SpeculationCounts()

    @property
    def progress(self) -> int:
        """Output tokens of all sequences; the number of vectors, if it is pooled."""
        if self.request.pooling is not None:
            return self.num_ended
        return sum(sequence.output.num_tokens for sequence in self.sequences)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still to be reported."""
        return self.request.sampling.prompt_logprobs is not None and self.num_prompt_logprobs < len(
            self.request.prompt_token_ids
        )

    def new_prompt_logprobs(self, part: PromptLogprobsPart) -> PromptLogprobsChunk | None:
        """Returns the unreported entries of a part, and counts them as reported. A row that begins again recomputes
        entries that were reported before."""
        start = self.num_prompt_logprobs
        num_known = start - part.start
        assert num_known >= 0, f"log-probabilities of the prompt are missing before position {part.start}"
        new = part.logprobs.part(num_known, len(part.logprobs.chosen))
        if not new.chosen:
            return None
        self.num_prompt_logprobs += len(new.chosen)
        return PromptLogprobsChunk(start, self.request.prompt_token_ids[start : self.num_prompt_logprobs], new)

    def finished(
        self, reason: EngineFinishReason, message: str, context: Context | None, now: float
    ) -> RequestFinished:
        arrival = self.request.arrival
        timings = self.timings
        timings.total_us = _microseconds(now - arrival)
        timings.queued_us = timings.total_us if self.started_at is None else _microseconds(self.started_at - arrival)
        if self.started_at is not None and self.first_token_at is not None:
            timings.prefill_us = _microseconds(self.first_token_at - self.started_at)
            timings.first_token_us = _microseconds(self.first_token_at - arrival)
        self.usage.output_tokens = sum(sequence.output.num_tokens for sequence in self.sequences)
        speculation = self.speculation if self.speculation.steps else None
        return RequestFinished(reason, self.usage, timings, message, context, speculation)

    def context(self, reason: EngineFinishReason, block_size: int) -> Context | None:
        """Returns the context for requests that continue this one; None if none may."""
        request = self.request
        if reason not in _CONTINUABLE or request.n > 1 or request.pooling is not None or self.started_at is None:
            return None
        sequence = self.sequences[0]
        token_ids = sequence.token_ids[: sequence.num_input_tokens + sequence.output.num_in_text]
        return Context(token_ids, sequence.hashes[: len(token_ids) // block_size])


@dataclass(slots=True, eq=False)
class SequenceState:
    """One of a request's n sequences."""

    live: RequestState
    index: int
    """0 to n-1."""
    rank: Rank
    hashes: list[bytes]
    """Hashes of the history's full blocks, up to the last one needed so far; empty with the cache off."""
    max_tokens: InitVar[int]
    pinned: list[int] = field(default_factory=list)
    """Blocks of the prompt that a forked sequence keeps until it runs."""
    pinned_window: WindowTable = field(default_factory=WindowTable)
    """The blocks of windowed groups that it keeps."""

    sampling: SamplingParams = field(init=False)
    state: SequenceStatus = SequenceStatus.WAITING
    token_ids: list[int] = field(init=False)
    """Prompt, accepted output and injected tokens; only output that the worker confirmed."""
    num_prompt_tokens: int = field(init=False)
    num_injected: int = 0
    """The number of injected tokens in the history."""
    to_inject: list[int] = field(default_factory=list)
    """Tokens that are injected once no token is in flight. Meanwhile the sequence waits."""
    is_pooled: bool = field(init=False)
    """If true, it ends with the result that contains its vector, and has no output: its row never decodes."""
    is_new: bool = field(init=False)
    """If true, its prompt was never computed, neither for it nor for the sequence that it was forked from."""
    output: OutputBuffer = field(init=False)
    length_bound: int = field(init=False)
    """The maximum length of the history after the results of all plans in flight."""
    length_limit: int = field(init=False)
    """The length at which output ends at the latest."""
    in_flight: deque[int] = field(default_factory=deque)
    """The maximum number of tokens that each plan in flight adds, for the plans that compute the sequence."""
    planned_at: int = -1
    """The last step that may add a token."""
    max_drafts: int = field(init=False)
    """The maximum number of drafts in a step."""
    repetition: Repetition | None = None
    """Whether its text repeats itself, if it has drafts from its text only then."""

    awaited_hash: bytes | None = None
    """The hash of the block that another sequence is computing and that this one waits for."""
    num_free_at_last_try: int = -1
    """The number of free blocks when they were too few for this sequence; -1: never tried."""
    num_overtaken: int = 0
    """The number of later sequences that began since too few blocks were first free for this one."""

    is_queued: bool = False
    """Whether the queue counts its work."""
    work: QueuedWork = NO_WORK
    """The work until it decodes, while it waits."""
    due: tuple[float, Rank] | None = None
    """Its deadline and its rank, where the queue is ordered by deadlines."""
    num_wanted: int = 0
    """Blocks of its history that it shares with the cache or adds to it, while it waits."""
    num_missing: int = 0
    """The number of wanted blocks that it must compute, because no sequence ahead of it does."""
    num_evicted: int = 0
    """The number of wanted blocks that must be copied back from the host tier."""
    num_stateless: int = 0
    """The number of wanted blocks that have KV but no saved state after them, and that no sequence ahead of it computes
    again."""
    num_shared: int = 0
    """The number of wanted blocks that another waiting sequence needed when this one began to wait."""

    row: int = -1
    epoch: int = 0
    decode: Decode = field(init=False)
    """The plan's entry that continues the row by one token; the same object every time, to save time."""
    block_ids: list[int] = field(default_factory=list)
    window: WindowTable = field(default_factory=WindowTable)
    """The blocks of the windowed groups."""
    capacity: int = 0
    """The number of positions in ``block_ids``."""
    num_computed: int = 0
    num_planned: int = 0
    num_published: int = 0
    """The number of leading blocks that are published or came from the cache."""
    prefill_end: int = 0
    """The history's length when the row began; chunks end here."""
    complete_from: int | None = None
    """The first step without the row, because the steps before it bring all its tokens."""

    def __post_init__(self, max_tokens: int) -> None:
        request = self.live.request
        self.sampling = sampling_of_choice(request.sampling, self.index)
        self.token_ids = list(request.prompt(self.index).token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.length_limit = self.num_prompt_tokens + max_tokens
        if request.resumed:
            resumed = request.resumed[self.index]
            assert isinstance(resumed.output, OutputBuffer)
            self.token_ids += resumed.token_ids
            self.output = resumed.output
            self.output.max_tokens = max_tokens
        else:
            self.output = new_output(request, self.index, self.live.texts[self.index], max_tokens)
        self.length_bound = len(self.token_ids)
        self.is_pooled = request.pooling is not None
        self.is_new = self.index == 0 or self.is_pooled
        self.max_drafts = request.max_drafts

    @property
    def num_input_tokens(self) -> int:
        """The number of tokens of the history that are not output."""
        return self.num_prompt_tokens + self.num_injected

    @property
    def held_blocks(self) -> list[int]:
        """The blocks of all groups that it has in its row, or keeps while it waits."""
        if self.row < 0:
            return [*self.pinned, *self.pinned_window.block_ids]
        return [*self.block_ids, *self.window.block_ids] if self.window.block_ids else self.block_ids

    @property
    def num_held(self) -> int:
        """The number of blocks of all groups in its row."""
        return len(self.block_ids) + len(self.window.block_ids)

    @property
    def reads_cache(self) -> bool:
        """Whether its row may begin after a cached prefix."""
        return not (self.index == 0 and self.live.wants_prompt_logprobs) and (
            not self.is_pooled or self.live.request.reads_cache
        )

    def start_row(
        self,
        row: int,
        epoch: int,
        block_ids: list[int],
        window: WindowTable,
        num_cached_blocks: int,
        block_size: int,
    ) -> None:
        """Begins a row, with KV in its first blocks."""
        assert self.state is SequenceStatus.WAITING
        assert not self.in_flight, "a row begins again before the result of its newest plan"
        assert self.length_bound == len(self.token_ids)
        self.state = SequenceStatus.PREFILLING
        self.is_new = False
        self.row, self.epoch = row, epoch
        self.decode = Decode(row, 1)
        self.block_ids = block_ids
        self.window = window
        self.capacity = len(block_ids) * block_size
        self.num_computed = self.num_planned = num_cached_blocks * block_size
        self.num_published = num_cached_blocks
        self.prefill_end = len(self.token_ids)
        self.awaited_hash = None
        self.num_free_at_last_try = -1
        self.num_overtaken = 0

    def set_max_drafts(self) -> None:
        """Sets the maximum number of drafts. Predicted and forced tokens may always be drafted; the tokens of its own
        text perhaps only while that repeats itself."""
        request, repetition = self.live.request, self.repetition
        may_have = repetition is None or repetition.is_found or request.prediction or request.grammar
        self.max_drafts = request.max_drafts if may_have else 0

    def limit(self, max_tokens: int) -> None:
        """Limits the output to this many tokens, even if there are more already."""
        self.output.max_tokens = max_tokens
        self.length_limit = self.num_input_tokens + max_tokens
        self.complete_from = None

    def inject(self) -> int:
        """Puts the tokens to inject at the end of the history; returns their number. No token is in flight."""
        assert not self.in_flight
        token_ids, self.to_inject = self.to_inject, []
        self.token_ids += token_ids
        self.num_injected += len(token_ids)
        self.length_bound = len(self.token_ids)
        self.limit(self.output.max_tokens)
        self.live.usage.prompt_tokens += len(token_ids)
        return len(token_ids)

    def fall_short(self, num_tokens: int) -> None:
        """Records that this many of the tokens that a plan might have added did not come."""
        self.length_bound -= num_tokens
        if self.length_bound < self.length_limit:
            self.complete_from = None

    def restart(self) -> None:
        """Makes the sequence wait again: the worker is gone, with the plans in flight and all KV."""
        self.in_flight.clear()
        self.length_bound = len(self.token_ids)
        self.awaited_hash = None
        self.num_free_at_last_try = -1
        self.pinned, self.pinned_window = [], WindowTable()
        self.leave_row()
        self.state = SequenceStatus.WAITING

    def leave_row(self) -> None:
        """Leaves the row and its blocks. Tokens in flight still count."""
        self.row = -1
        self.block_ids = []
        self.window = WindowTable()
        self.capacity = 0
        self.complete_from = None
        self.num_computed = self.num_planned = self.num_published = 0


def sampling_of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Returns the request's sampling for sequence 0; for the others, with another seed and without log-probabilities of
    the prompt."""
    if index == 0:
        return sampling
    field = b"penstock.choice.1" + sampling.seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    seed = int.from_bytes(hashlib.sha256(field).digest()[:8], "little")
    return msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=None)


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))

"""What the scheduler knows of a request while it lives, and of each of its choices. Decides nothing.

Where a choice stands, in positions of its history:

    0 .............. num_computed ........ num_planned .......... len(token_ids) .......... length_bound
    |  KV confirmed  |  KV in a plan that  |  not planned yet      |  at most what plans     |
    |                |  is not answered    |  (prompt chunks)      |  in flight will add     |

A decoding choice has everything planned that is known; then the worker alone knows where between ``len(token_ids)`` and
``length_bound`` the row's history ends.
"""

import hashlib
from collections import deque
from enum import Enum, auto

import msgspec

from penstock.scheduler.plan import Decode, PromptLogprobsPart, SamplingParams, TokenLogprobs
from penstock.scheduler.planning.stop_checker import OutputBuffer
from penstock.scheduler.planning.tenants import TenantUse
from penstock.scheduler.policy import Rank
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

_CONTINUABLE = frozenset({EngineFinishReason.STOP, EngineFinishReason.LENGTH, EngineFinishReason.CANCELLED})


class SequenceStatus(Enum):
    """Where a choice is."""

    WAITING = auto()
    """In the queue: new, forked or preempted. It holds no row."""
    PREFILLING = auto()
    """Has a row and all blocks of its history; chunks of it are still to be planned."""
    DECODING = auto()
    """Has a row that continues by itself, or one that is pooled and waits for its last answer."""
    ENDED = auto()


class RequestState:
    """A request from admission to its one ``RequestFinished``."""

    __slots__ = (
        "entered_at",
        "expected_s",
        "expected_ttft_s",
        "first_token_at",
        "forked",
        "held",
        "num_ended",
        "num_prompt_logprobs",
        "number",
        "request",
        "sequences",
        "speculation",
        "started_at",
        "tenant",
        "texts",
        "timeline",
        "timings",
        "usage",
        "work",
    )

    def __init__(
        self, request: Request, number: int, texts: list[TextState], tenant: TenantUse, timeline: Timeline
    ) -> None:
        self.request = request
        """Another one, with what its caller changed, where that happened."""
        self.number = number
        """Of arrival."""
        self.tenant = tenant
        self.timeline = timeline
        self.held = False
        """Nobody reads its output, so nothing of it is planned."""
        self.sequences: list[SequenceState] = []
        """Choice 0 alone, until the prompt is computed."""
        self.texts = texts
        """Of the choices: made at admission, where a failure is the request's alone."""
        self.entered_at = 0.0
        """When it was admitted."""
        self.expected_ttft_s: float | None = None
        """What was predicted until its first token; None where that came, or says nothing."""
        self.expected_s: float | None = None
        """From then to its last token, as predicted; None where that does not depend on the load alone."""
        self.work = NO_WORK
        """What had to be done then before it could decode."""
        self.forked = request.n == 1 or request.pooling is not None
        self.num_ended = 0
        self.num_prompt_logprobs = 1
        """Positions of the prompt whose log-probabilities are reported; the first token has none."""
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.usage = TokenUsage(prompt_tokens=request.num_prompt_tokens)
        self.timings = RequestTimings()
        self.speculation = SpeculationCounts()

    @property
    def progress(self) -> int:
        """Output tokens of all choices; vectors, where it is pooled."""
        if self.request.pooling is not None:
            return self.num_ended
        return sum(sequence.output.num_tokens for sequence in self.sequences)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether there are log-probabilities of the prompt that nobody was told yet."""
        return self.request.sampling.prompt_logprobs is not None and self.num_prompt_logprobs < len(
            self.request.prompt_token_ids
        )

    def new_prompt_logprobs(self, part: PromptLogprobsPart) -> PromptLogprobsChunk | None:
        """What a part has that its caller was not told, who is told it now; a row that began again computes again what
        was reported before."""
        start = self.num_prompt_logprobs
        num_known = start - part.start
        assert num_known >= 0, f"log-probabilities of the prompt are missing before position {part.start}"
        logprobs = part.logprobs
        if num_known >= len(logprobs.chosen):
            return None
        num_entries = num_known * logprobs.num_top
        new = TokenLogprobs(
            logprobs.num_top,
            logprobs.chosen[num_known:],
            logprobs.top_token_ids[num_entries:],
            logprobs.top[num_entries:],
        )
        self.num_prompt_logprobs += len(new.chosen)
        return PromptLogprobsChunk(start, new)

    def finished(
        self, reason: EngineFinishReason, message: str, context: Context | None, now: float
    ) -> RequestFinished:
        """The request's last event."""
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
        """What those that continue it begin with; None if nobody may."""
        request = self.request
        if reason not in _CONTINUABLE or request.n > 1 or request.pooling is not None or self.started_at is None:
            return None
        sequence = self.sequences[0]
        token_ids = sequence.token_ids[: sequence.num_prompt_tokens + sequence.output.num_in_text]
        return Context(token_ids, sequence.hashes[: len(token_ids) // block_size])


class SequenceState:
    """One of a request's n sequences."""

    __slots__ = (
        "awaited_hash",
        "block_ids",
        "capacity",
        "complete_from",
        "decode",
        "due",
        "epoch",
        "hashes",
        "in_flight",
        "is_new",
        "is_pooled",
        "is_queued",
        "length_bound",
        "length_limit",
        "live",
        "max_drafts",
        "num_computed",
        "num_evicted",
        "num_free_at_last_try",
        "num_missing",
        "num_overtaken",
        "num_planned",
        "num_prompt_tokens",
        "num_published",
        "num_shared",
        "num_wanted",
        "output",
        "pinned",
        "prefill_end",
        "rank",
        "row",
        "sampling",
        "state",
        "token_ids",
        "work",
    )

    def __init__(
        self, live: RequestState, index: int, rank: Rank, hashes: list[bytes], max_tokens: int, pinned: list[int]
    ) -> None:
        request = live.request
        self.live = live
        self.rank = rank
        self.sampling = sampling_of_choice(request.sampling, index)
        self.state = SequenceStatus.WAITING
        self.token_ids = list(request.prompt(index).token_ids)
        """Prompt and accepted output; only what the worker confirmed."""
        self.num_prompt_tokens = len(self.token_ids)
        self.is_pooled = request.pooling is not None
        """It ends with the answer that brings its vector, and has no output: its row never decodes."""
        self.is_new = index == 0 or self.is_pooled
        """Nothing of its prompt was ever computed for it, or for the choice that it was forked from."""
        self.output = OutputBuffer(
            index,
            live.texts[index],
            request.sampling.stop_token_ids,
            request.sampling.min_tokens,
            max_tokens,
            request.sampling.logprobs,
            request.grammar_end_ids,
        )
        self.length_bound = len(self.token_ids)
        """The longest that the history can be when every plan in flight is answered."""
        self.length_limit = self.length_bound + max_tokens
        """Where output ends at the latest."""
        self.in_flight: deque[int] = deque()
        """For each unanswered plan that computes the choice: how many tokens it may add."""
        self.max_drafts = request.max_drafts
        """Tokens that may be drafted for it in a step."""

        self.hashes = hashes
        """Of the history's full blocks, as far as they were needed; empty with the cache off."""
        self.awaited_hash: bytes | None = None
        """The block that somebody else is computing and that this choice waits for."""
        self.num_free_at_last_try = -1
        """How many blocks were free when they were too few for this choice; -1: never tried."""
        self.num_overtaken = 0
        """How many began that were behind it, since it was first too large for what was free."""
        self.pinned = pinned
        """Blocks of the prompt that a forked choice keeps until it runs."""

        self.is_queued = False
        """Whether the queue counts its work."""
        self.work: QueuedWork = NO_WORK
        """While it waits: what has to be done before it decodes."""
        self.due: tuple[float, Rank] | None = None
        """Its deadline and its rank, where the queue is ordered by deadlines."""
        self.num_wanted = 0
        """Blocks of its history that it shares with the cache or puts there, while it waits."""
        self.num_missing = 0
        """Of these, the ones that it has to compute: no sequence ahead of it does."""
        self.num_evicted = 0
        """Of these, the ones that have to be copied back from the host tier."""
        self.num_shared = 0
        """Of these, the ones that another waiting sequence had wanted when this one began to wait."""

        self.row = -1
        self.epoch = 0
        self.decode = Decode(-1, 1)
        """What a plan says to continue the row by one token; the same object every time, to save time."""
        self.block_ids: list[int] = []
        self.capacity = 0
        """Positions that ``block_ids`` hold."""
        self.num_computed = 0
        self.num_planned = 0
        self.num_published = 0
        """Blocks, from the first one, that are published or came from the cache."""
        self.prefill_end = 0
        """The history's length when the row began: chunks go up to here."""
        self.complete_from: int | None = None
        """The first step that the row is not in because those before it bring all its tokens."""

    @property
    def index(self) -> int:
        """0 to n-1."""
        return self.output.index

    @property
    def reads_cache(self) -> bool:
        """Whether its row may begin after a cached prefix."""
        return not (self.index == 0 and self.live.wants_prompt_logprobs) and (
            not self.is_pooled or self.live.request.reads_cache
        )

    def start_row(self, row: int, epoch: int, block_ids: list[int], num_cached_blocks: int, block_size: int) -> None:
        """A row's life starts, with KV in its first blocks."""
        assert self.state is SequenceStatus.WAITING
        assert not self.in_flight, "a row begins again before its newest plan is answered"
        assert self.length_bound == len(self.token_ids)
        self.state = SequenceStatus.PREFILLING
        self.is_new = False
        self.row, self.epoch = row, epoch
        self.decode = Decode(row, 1)
        self.block_ids = block_ids
        self.capacity = len(block_ids) * block_size
        self.num_computed = self.num_planned = num_cached_blocks * block_size
        self.num_published = num_cached_blocks
        self.prefill_end = len(self.token_ids)
        self.awaited_hash = None
        self.num_free_at_last_try = -1
        self.num_overtaken = 0

    def limit(self, max_tokens: int) -> None:
        """Output ends after so many tokens, also if there are more already."""
        self.output.max_tokens = max_tokens
        self.length_limit = self.num_prompt_tokens + max_tokens
        self.complete_from = None

    def fall_short(self, num_tokens: int) -> None:
        """So many of the tokens that a plan might have added did not come."""
        self.length_bound -= num_tokens
        if self.length_bound < self.length_limit:
            self.complete_from = None

    def restart(self) -> None:
        """The worker is gone: with it what was in flight, and all KV. The choice waits again."""
        self.in_flight.clear()
        self.length_bound = len(self.token_ids)
        self.awaited_hash = None
        self.num_free_at_last_try = -1
        self.pinned = []
        self.leave_row()
        self.state = SequenceStatus.WAITING

    def leave_row(self) -> None:
        """The row's life is over, and its blocks are given up; what is in flight still counts."""
        self.row = -1
        self.block_ids = []
        self.capacity = 0
        self.complete_from = None
        self.num_computed = self.num_planned = self.num_published = 0


def sampling_of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """The request's own for choice 0; another seed, and no log-probabilities of the prompt, for the others."""
    if index == 0:
        return sampling
    field = b"penstock.choice.1" + sampling.seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    seed = int.from_bytes(hashlib.sha256(field).digest()[:8], "little")
    return msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=None)


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))

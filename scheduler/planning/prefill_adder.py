"""Who begins in a plan: whether there is room for a waiting choice, and what of its history is cached. Gives rows and
blocks out, and takes none away; knows no chunks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.kv.manager import KVCacheManager
from penstock.scheduler.plan import AddedRow, SamplingParams, StepPlan
from penstock.scheduler.planning.pins import PinnedPrefixes
from penstock.scheduler.planning.queues import RunningQueue, WaitingQueue
from penstock.scheduler.planning.restoring import HostTierRestorePolicy
from penstock.scheduler.planning.rows import RowIdAllocator
from penstock.scheduler.planning.sequence import RequestState, SequenceState
from penstock.scheduler.recovery.crash_bisector import CrashBisector
from penstock.scheduler.timeline import Cause

MAX_ADDED_TOKENS = 1 << 18
"""History of the rows that begin in one plan, unless it is one row's: bounds the loop's time for a plan."""
MAX_OVERTAKEN = 32
"""So many may begin that are behind a choice for which too few blocks are free; then they wait until it has begun."""
MAX_PASSED_OVER = 8
"""So many choices that find no room does a plan look at."""


@dataclass(slots=True)
class PrefillRound:
    """What one plan has found out about those that wait."""

    passed_over: list[SequenceState] = field(default_factory=list)
    """Those for which too few blocks are free."""
    num_added_tokens: int = 0
    is_over: bool = False
    """Nobody else begins in this plan."""


class PrefillAdder:
    """The way from the queue to a row."""

    def __init__(
        self,
        kv: KVCacheManager,
        waiting: WaitingQueue,
        running: RunningQueue,
        rows: RowIdAllocator[SequenceState],
        pins: PinnedPrefixes,
        suspects: CrashBisector,
        restoring: HostTierRestorePolicy,
        clock: Callable[[], float],
    ) -> None:
        self.max_rows = 0
        self.is_late: Callable[[RequestState], bool] = lambda live: False
        """Whether a request that has not begun can no longer meet its deadline."""
        self.num_cached_tokens = 0
        """Positions that the prefix cache saved, since the start."""
        self._kv = kv
        self._waiting = waiting
        self._running = running
        self._rows = rows
        self._pins = pins
        self._suspects = suspects
        self._restoring = restoring
        self._clock = clock
        # A row that begins leaves so many blocks to those that run, or it would often be preempted at once.
        self._reserved_blocks = kv.pool.num_blocks // 100
        self._late: list[RequestState] = []

    def take_late(self) -> list[RequestState]:
        """Requests that were found too late to begin, for the caller to end."""
        late, self._late = self._late, []
        return late

    def schedulable(self, this_round: PrefillRound) -> Iterator[SequenceState]:
        """Those that may begin if there is room, in order. May be read one ahead of what is planned."""
        for choice in self._waiting.in_order():
            if this_round.is_over:
                return
            if len(self._running) >= self.max_rows or not self._rows.num_free:
                choice.live.timeline.waits(choice.index, Cause.ROWS, self.max_rows)
                return
            if not self._is_kept_back(choice):
                yield choice

    def try_add(self, plan: StepPlan, choice: SequenceState, this_round: PrefillRound) -> bool:
        """Begins a row, if there is room for it."""
        if this_round.is_over or len(self._running) >= self.max_rows:
            return False
        timeline, num_tokens = choice.live.timeline, len(choice.token_ids)
        if choice.in_flight or (plan.added and this_round.num_added_tokens + num_tokens > MAX_ADDED_TOKENS):
            timeline.waits(choice.index, Cause.LAST_ANSWER if choice.in_flight else Cause.NEXT_PLAN)
            this_round.is_over = True
            return False
        # If nothing was freed since the last try, looking up a long prefix again is no use.
        if not self._lacks_blocks(choice):
            found = self._prefix(choice)
            if found is None:
                timeline.waits(choice.index, Cause.PREFIX)
                return False
            prefix, restored = found
            block_ids = self._allocate(choice, prefix, restored)
            if block_ids is not None:
                self._begin(plan, choice, block_ids, len(prefix) + len(restored))
                this_round.num_added_tokens += num_tokens
                for other in this_round.passed_over:
                    other.num_overtaken += 1
                return True
            choice.num_free_at_last_try = self._kv.pool.num_free
        timeline.waits(choice.index, Cause.BLOCKS, self._kv.pool.num_free, self.num_blocks_for(choice))
        this_round.passed_over.append(choice)
        if choice.num_overtaken >= MAX_OVERTAKEN or len(this_round.passed_over) == MAX_PASSED_OVER:
            this_round.is_over = True
        return False

    def first_without_room(self) -> SequenceState | None:
        """Whoever would begin next, if rows or blocks are all that it lacks."""
        choice = next((choice for choice in self._waiting.in_order() if not self._is_kept_back(choice)), None)
        if choice is None or choice.in_flight:
            return None
        has_room = len(self._running) < self.max_rows and not self._lacks_blocks(choice)
        return None if has_room else choice

    def num_blocks_for(self, choice: SequenceState) -> int:
        """Blocks that must be free for a choice of which nothing is cached."""
        return self._kv.num_blocks_for(len(choice.token_ids)) + self._reserved_blocks

    def num_missing_for(self, choice: SequenceState) -> int:
        """Blocks that must be free for a choice, beside those that it shares with rows that run."""
        if not choice.reads_cache:
            return self.num_blocks_for(choice)
        prefix = choice.pinned or self._kv.find_prefix(choice.hashes, len(choice.token_ids))
        return self.num_blocks_for(choice) - sum(map(self._kv.pool.is_held, prefix))

    def _is_kept_back(self, choice: SequenceState) -> bool:
        """Whether something else than room keeps it from beginning; whoever is behind need not wait for that."""
        live = choice.live
        if live.held:
            return True
        if not self.may_run(live):
            live.timeline.waits(choice.index, Cause.SUSPECT)
            return True
        if choice.awaited_hash is not None and self._kv.is_pending(choice.awaited_hash):
            live.timeline.waits(choice.index, Cause.PREFIX)
            return True
        if live.started_at is None and live.request.deadline is not None:
            if choice.index and live in self._late:
                return True  # as its first prompt is, which was asked about before: there may be thousands
            if self.is_late(live):
                self._late.append(live)
                return True
        return False

    def may_run(self, live: RequestState) -> bool:
        """Whether a request may be in a step now, with those on trial that ended a worker."""
        return not self._suspects or self._suspects.may_run(live.request.request_id)

    def _lacks_blocks(self, choice: SequenceState) -> bool:
        """Whether it was tried with as many free blocks as there are now."""
        return len(self._running) > 0 and self._kv.pool.num_free <= choice.num_free_at_last_try

    def _prefix(self, choice: SequenceState) -> tuple[list[int], Sequence[bytes]] | None:
        """Blocks with KV of the history's beginning, and hashes of those after them that are to be copied back; None if
        it is better to wait for more."""
        if choice.pinned:
            return choice.pinned, ()
        if not choice.reads_cache:
            return [], ()
        kv = self._kv
        num_tokens = len(choice.token_ids)
        kv.hashing.extend(choice.hashes, choice.token_ids, num_tokens // kv.block_size, choice.live.request.hash_salt)
        prefix = kv.find_prefix(choice.hashes, num_tokens)
        restored = self._restoring.find(choice.hashes, len(prefix), num_tokens)
        num_found = len(prefix) + len(restored)
        awaited = kv.last_pending(choice.hashes, num_found, num_tokens)
        if awaited is not None:
            leader = kv.leader(awaited)
            assert isinstance(leader, SequenceState)
            if leader.rank[0] > choice.rank[0]:
                # It might wait long for the other's turn, so it computes the same by itself; others wait for it then.
                kv.retract(leader, choice.hashes[num_found:])
                awaited = None
        choice.awaited_hash = awaited
        return None if awaited is not None else (prefix, restored)

    def _allocate(self, choice: SequenceState, prefix: list[int], restored: Sequence[bytes]) -> list[int] | None:
        num_tokens = len(choice.token_ids)
        reserve = self._reserved_blocks if len(self._running) else 0
        block_ids = self._kv.allocate(prefix, num_tokens, reserve, restored)
        if len(self._running):
            return block_ids
        if block_ids is None and self._pins.remove_all(but=choice):
            block_ids = self._kv.allocate(prefix, num_tokens, 0, restored)
        assert block_ids is not None, "a request that fits alone finds no room although nothing runs"
        return block_ids

    def _begin(self, plan: StepPlan, choice: SequenceState, block_ids: list[int], num_cached_blocks: int) -> None:
        live = choice.live
        self._waiting.remove(choice)
        self._pins.remove(choice)
        num_cached = num_cached_blocks * self._kv.block_size
        if live.started_at is None:
            live.started_at = self._clock()
        if choice.is_new:
            live.usage.cached_tokens += num_cached
        self.num_cached_tokens += num_cached
        row, epoch = self._rows.allocate_row(choice)
        choice.start_row(row, epoch, block_ids, num_cached_blocks, self._kv.block_size)
        live.timeline.began(choice.index, plan.step, num_cached)
        self._running.add_sequence(choice)
        self._kv.announce(choice, choice.hashes[num_cached_blocks:])
        plan.added.append(
            AddedRow(
                row,
                epoch,
                choice.token_ids.copy(),
                choice.num_prompt_tokens,
                num_cached,
                block_ids.copy(),
                _sampling_of_row(choice, live),
                live.request.pooling,
                live.request.max_drafts,
                live.request.grammar,
                live.request.tenant,
            )
        )


def _sampling_of_row(choice: SequenceState, live: RequestState) -> SamplingParams:
    """What was reported of the prompt's log-probabilities is not computed again."""
    if choice.sampling.prompt_logprobs is not None and not live.wants_prompt_logprobs:
        return replace(choice.sampling, prompt_logprobs=None)
    return choice.sampling

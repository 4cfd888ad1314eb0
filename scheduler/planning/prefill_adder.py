"""Begins rows in a plan: checks whether there is room for a waiting sequence, and what of its history is cached. It
assigns rows and blocks, and takes none away; it does not plan chunks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from penstock.kv.window_blocks import WindowTable
from penstock.scheduler.plan import AddedRow, StepPlan
from penstock.scheduler.planning.context import PlanningContext
from penstock.scheduler.planning.pinned_prefixes import PinnedPrefixes
from penstock.scheduler.planning.restore_policy import HostTierRestorePolicy
from penstock.scheduler.planning.row_states import RowStates
from penstock.scheduler.planning.sequence import RequestState, SequenceState
from penstock.scheduler.planning.tenants import TenantUse
from penstock.scheduler.policy import may_follow
from penstock.scheduler.timeline_entry import HoldCause, WaitCause

MAX_ADDED_TOKENS = 1 << 18
"""The maximum number of tokens in the histories of rows that begin in one plan, unless there is only one row. Limits
the loop's time for a plan."""
MAX_OVERTAKEN = 32
"""The maximum number of sequences that may overtake one that lacks KV blocks. After that they wait for it, so it does
not starve."""
MAX_WITHOUT_ROOM = 8
"""The maximum number of sequences without room that a plan examines."""


@dataclass(slots=True)
class PrefillRound:
    """What one plan has found out about waiting sequences."""

    without_room: list[SequenceState] = field(default_factory=list)
    """The sequences for which too few blocks are free."""
    num_added_tokens: int = 0
    is_over: bool = False
    """If true, no other sequence begins in this plan."""
    tenants_over: set[TenantUse] = field(default_factory=set)
    """Tenants of which no other sequence begins in this plan: they have their share of the step or of the blocks."""


class CachedPrefix(NamedTuple):
    """The part of a history after which a row begins."""

    block_ids: list[int]
    """Its blocks on the device."""
    window: WindowTable
    """What the windowed groups need of it."""
    restored: Sequence[bytes] = ()
    """The hashes of the blocks after them, to copy back."""
    num_found: int = 0
    """The number of blocks with KV. Without a saved state at the end, or without what windows see from there, a row
    begins after fewer."""

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids) + len(self.restored)


class PrefillAdder:
    """Moves sequences from the queue to a row."""

    def __init__(
        self,
        context: PlanningContext,
        pinned: PinnedPrefixes,
        restore_policy: HostTierRestorePolicy,
        states: RowStates,
        is_late: Callable[[RequestState], bool],
    ) -> None:
        """``is_late`` returns whether a request that has not begun can no longer meet its deadline."""
        self._context = context
        self._kv, self._waiting, self._running = context.kv, context.waiting, context.running
        self._pinned = pinned
        self._restore_policy = restore_policy
        self._states = states
        self._is_late = is_late
        # A row that begins leaves this many blocks to the running ones; otherwise it would often be preempted at once.
        self._reserved_blocks = self._kv.pool.num_blocks // 100
        self._late: list[RequestState] = []

    def take_late(self) -> list[RequestState]:
        """Returns the requests that were found too late to begin, which the caller must end."""
        late, self._late = self._late, []
        return late

    def schedulable(self, this_round: PrefillRound) -> Iterator[SequenceState]:
        """Iterates, in order, over the sequences that may begin if there is room. The caller may read one further than
        it plans."""
        for sequence in self._waiting.in_order(this_round.tenants_over):
            if this_round.is_over:
                return
            if len(self._running) >= self._context.max_rows or not self._context.rows.num_free:
                sequence.live.timeline.waits(sequence.index, WaitCause.ROWS, self._context.max_rows)
                return
            if not self._states.has_room:
                sequence.live.timeline.waits(sequence.index, WaitCause.STATES, self._kv.states.num_slots)
                return
            if not self._is_blocked(sequence):
                yield sequence

    def try_add(self, plan: StepPlan, sequence: SequenceState, this_round: PrefillRound) -> bool:
        """Begins a row, if there is room for it."""
        if this_round.is_over or not self._has_row():
            return False
        timeline, num_tokens = sequence.live.timeline, len(sequence.token_ids)
        if sequence.in_flight or (plan.added and this_round.num_added_tokens + num_tokens > MAX_ADDED_TOKENS):
            timeline.waits(sequence.index, WaitCause.LAST_RESULT if sequence.in_flight else WaitCause.NEXT_STEP)
            this_round.is_over = True
            return False
        # If nothing was freed since the last try, looking up a long prefix again is useless.
        if not self._lacks_blocks(sequence):
            found = self._prefix(sequence)
            if found is None:
                timeline.waits(sequence.index, WaitCause.PREFIX)
                return False
            block_ids = self._allocate(sequence, found)
            if block_ids is not None:
                self._begin(plan, sequence, block_ids, found)
                this_round.num_added_tokens += num_tokens
                for other in this_round.without_room:
                    other.num_overtaken += 1
                return True
            sequence.num_free_at_last_try = self._kv.pool.num_free
        timeline.waits(sequence.index, WaitCause.BLOCKS, self._kv.pool.num_free, self.num_blocks_for(sequence))
        if self._waiting.num_lanes > 1 and self._context.is_above_share(sequence.live.tenant):
            this_round.tenants_over.add(sequence.live.tenant)  # other tenants do not wait for it
            return False
        this_round.without_room.append(sequence)
        if sequence.num_overtaken >= MAX_OVERTAKEN or len(this_round.without_room) == MAX_WITHOUT_ROOM:
            this_round.is_over = True
        return False

    def without_room(self) -> Iterator[SequenceState]:
        """Iterates over the sequences that would begin next, if they lack only rows or blocks: at most one, or one of
        each tenant where tenants take turns."""
        seen: set[TenantUse] = set()
        for sequence in self._waiting.in_order(seen):
            if self._is_blocked(sequence):
                continue
            # A slot for a state is free again after a result, unless a row that is held has it.
            lacks_slot = bool(self._running.held) and not self._states.has_room
            lacks_row = lacks_slot or len(self._running) >= self._context.max_rows
            if not sequence.in_flight and (lacks_row or self._lacks_blocks(sequence)):
                yield sequence
            if not self._waiting.by_turns:
                return
            seen.add(sequence.live.tenant)

    def num_blocks_for(self, sequence: SequenceState) -> int:
        """Returns the number of free blocks that a sequence with nothing cached needs."""
        return self._kv.windows.groups.num_blocks_for(len(sequence.token_ids)) + self._reserved_blocks

    def num_missing_for(self, sequence: SequenceState) -> int:
        """Returns the number of free blocks that a sequence needs, beside those that it shares with running rows."""
        if not sequence.reads_cache:
            return self.num_blocks_for(sequence)
        kv, hashes, num_tokens = self._kv, sequence.hashes, len(sequence.token_ids)
        prefix, window = sequence.pinned, sequence.pinned_window
        if not prefix:
            prefix = kv.find_prefix(hashes, num_tokens)
            prefix = prefix[: kv.num_usable(hashes, len(prefix))]
            window = kv.windows.find(hashes, len(prefix))
        num_held = sum(kv.pool.is_held(block) for block in (*prefix, *window.block_ids) if block >= 0)
        num_of_window = len(window.block_ids) + kv.windows.num_ahead(len(prefix), num_tokens)
        return kv.num_blocks_for(num_tokens) + num_of_window + self._reserved_blocks - num_held

    def _is_blocked(self, sequence: SequenceState) -> bool:
        """Returns whether something other than room keeps the sequence from beginning. Later sequences need not wait
        for that."""
        live = sequence.live
        if live.held:
            return True
        if sequence.to_inject:
            live.timeline.waits(sequence.index, WaitCause.LAST_RESULT)
            return True
        if not self._context.bisector.may_run(live.request.request_id):
            live.timeline.waits(sequence.index, HoldCause.SUSPECT)
            return True
        if sequence.awaited_hash is not None and self._kv.leader(sequence.awaited_hash) is not None:
            live.timeline.waits(sequence.index, WaitCause.PREFIX)
            return True
        if live.started_at is None and live.request.deadline is not None:
            if sequence.index and live in self._late:
                return True  # its first prompt was checked already, and there may be thousands
            if self._is_late(live):
                self._late.append(live)
                return True
        if live.request.adapter is not None and not self._context.adapters.is_ready(live.request.adapter):
            live.timeline.waits(sequence.index, WaitCause.ADAPTER)
            return True
        return False

    def _has_row(self) -> bool:
        return len(self._running) < self._context.max_rows and self._states.has_room

    def _lacks_blocks(self, sequence: SequenceState) -> bool:
        """Returns whether it was tried with at least as many free blocks as there are now."""
        return len(self._running) > 0 and self._kv.pool.num_free <= sequence.num_free_at_last_try

    def _prefix(self, sequence: SequenceState) -> CachedPrefix | None:
        """Returns what is cached of the history's beginning; None if it is better to wait for more."""
        if sequence.pinned:
            return CachedPrefix(sequence.pinned, sequence.pinned_window)
        if not sequence.reads_cache:
            return CachedPrefix([], WindowTable())
        kv = self._kv
        num_tokens = len(sequence.token_ids)
        salt = sequence.live.request.hash_salt
        kv.extend_hashes(sequence.hashes, sequence.token_ids, num_tokens // kv.block_size, salt)
        prefix = kv.find_prefix(sequence.hashes, num_tokens)
        restored = self._restore_policy.find(sequence.hashes, len(prefix), num_tokens)
        num_found = len(prefix) + len(restored)
        # Blocks of group 0 that are found are of no use without their windows, which another row may compute again.
        num_whole = kv.windows.num_usable(sequence.hashes, num_found)
        awaited = kv.last_pending(sequence.hashes, num_whole, num_tokens)
        if awaited is None:
            awaited = self._states.last_coming(sequence, num_found)
        if awaited is not None:
            leader = kv.leader(awaited)
            assert isinstance(leader, SequenceState)
            if may_follow(sequence.rank, leader.rank, sequence.live.request.first_token_target):
                self._states.request(leader, sequence, awaited)
            else:  # it computes the prefix itself, and others wait for it
                kv.retract(leader, sequence.hashes[num_whole:])
                awaited = None
        sequence.awaited_hash = awaited
        if awaited is not None:
            return None
        num_usable = kv.num_usable(sequence.hashes, num_found)
        window = kv.windows.find(sequence.hashes, num_usable)
        return CachedPrefix(prefix[:num_usable], window, restored[: max(0, num_usable - len(prefix))], num_found)

    def _allocate(self, sequence: SequenceState, found: CachedPrefix) -> list[int] | None:
        prefix, restored, window = found.block_ids, found.restored, found.window
        num_tokens, owner = len(sequence.token_ids), sequence.live.request.tenant
        # The row gets the blocks of windowed groups with its chunks.
        num_ahead = self._kv.windows.num_ahead(found.num_blocks, num_tokens)
        reserve = num_ahead + (self._reserved_blocks if len(self._running) else 0)
        block_ids = self._kv.allocate(prefix, num_tokens, reserve, restored, owner, window)
        if len(self._running):
            return block_ids
        if block_ids is None and self._pinned.remove_all(but=sequence):
            block_ids = self._kv.allocate(prefix, num_tokens, num_ahead, restored, owner, window)
        assert block_ids is not None, "a request that fits alone finds no room although nothing runs"
        return block_ids

    def _begin(self, plan: StepPlan, sequence: SequenceState, block_ids: list[int], prefix: CachedPrefix) -> None:
        live, num_cached_blocks = sequence.live, prefix.num_blocks
        self._waiting.remove(sequence)
        self._pinned.remove(sequence)
        num_cached = num_cached_blocks * self._kv.block_size
        if live.started_at is None:
            live.started_at = self._context.clock()
        if sequence.is_new:
            live.usage.cached_tokens += min(num_cached, sequence.num_prompt_tokens)  # output may be cached too
        self._context.counters.cached_tokens += num_cached
        sampling = sequence.sampling
        if sampling.prompt_logprobs is not None and not live.wants_prompt_logprobs:
            sampling = replace(sampling, prompt_logprobs=None)  # they were reported before
        if sequence.num_injected and sampling.min_tokens:
            # The worker counts from the prompt's end.
            sampling = replace(sampling, min_tokens=sampling.min_tokens + sequence.num_injected)
        state_slot, state_source = self._states.start_row(sequence, num_cached_blocks, prefix.num_found)
        row, epoch = self._context.rows.allocate_row(sequence)
        sequence.start_row(row, epoch, block_ids, prefix.window, num_cached_blocks, self._kv.block_size)
        num_missed = max(0, prefix.num_found - num_cached_blocks) * self._kv.block_size
        live.timeline.began(sequence.index, plan.step, num_cached, num_missed)
        self._running.add_sequence(sequence)
        self._kv.announce(sequence, sequence.hashes[num_cached_blocks:])
        plan.added.append(
            AddedRow(
                row,
                epoch,
                sequence.token_ids.copy(),
                sequence.num_prompt_tokens,
                num_cached,
                block_ids.copy(),
                sampling,
                live.request.pooling,
                live.request.max_drafts,
                live.request.grammar,
                live.request.tenant,
                live.request.prediction,
                state_slot,
                state_source,
                0 if live.request.adapter is None else live.request.adapter.slot,
                prefix.window.start,
                prefix.window.block_ids.copy(),
            )
        )

"""The waiting, running and held sequences, each in order, and the work in the queue. It does not know plans.

The order is that of ranks. Where tenants take turns, their turns come first, and change with every step.
"""

import heapq
import math
from bisect import insort
from collections.abc import Container, Iterator
from itertools import chain
from operator import attrgetter
from typing import cast

from penstock.kv.manager import KVCacheManager
from penstock.scheduler.planning.ordered_queue import OrderedQueue
from penstock.scheduler.planning.sequence import SequenceState, SequenceStatus
from penstock.scheduler.planning.tenants import RequestCount, TenantUse
from penstock.scheduler.policy import Policy, Rank
from penstock.scheduler.timing.queued_work import QueuedWork, sequence_work, total_work

Order = tuple[float, Rank]
"""(the tenant's turn, or 0 where tenants take none; the rank)."""


_RANK, _DUE = attrgetter("rank"), attrgetter("due")


class WaitingQueue:
    """Sequences without a row: new, forked and preempted ones."""

    def __init__(self, policy: Policy, kv: KVCacheManager) -> None:
        self.by_turns = False
        """Whether tenants take turns."""
        self.queued = RequestCount()
        """The size of the queue: requests whose first prompt has not begun, and the tokens of all prompts that have not
        begun. Excludes warm-ups."""
        self.num_warm_ups = 0
        """The sequences of warm-ups."""
        self.num_pooled = 0
        """Pooled sequences, which have a row only until their prompts are computed."""
        self._kv = kv
        self._wanted = kv.wanted
        self._block_size = kv.block_size
        self._num_sequences = 0
        self._own: dict[str, RequestCount] = {}
        """The queued requests and tokens of each tenant that has any. Counted as they enter and leave, because there
        may be many."""
        self._lanes: dict[str, OrderedQueue] = {}
        """One for each tenant, or one for all; none is empty."""
        self._due: OrderedQueue | None = None
        """The sequences with a deadline, ordered by it; only under the policy ``deadline``."""
        kv.wanted.on_charged = self._charge
        kv.states.on_changed = self._state_changed
        self.arrange(policy)

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[SequenceState]:
        """Iterates in any order."""
        return chain.from_iterable(self._lanes.values())

    @property
    def num_lanes(self) -> int:
        """The number of lanes: one for each waiting tenant where tenants take turns, otherwise at most one."""
        return len(self._lanes)

    def queued_of(self, tenant: str) -> RequestCount:
        return self._own.get(tenant, RequestCount())

    def order(self, sequence: SequenceState) -> Order:
        return (sequence.live.tenant.turn if self.by_turns else 0.0, sequence.rank)

    def arrange(self, policy: Policy) -> None:
        """Sorts again, after ranks or the policy have changed."""
        sequences = list(self)
        self.by_turns = policy is Policy.FAIR
        by_lane: dict[str, list[SequenceState]] = {}
        for sequence in sequences:
            by_lane.setdefault(self._lane(sequence), []).append(sequence)
        self._lanes = {name: OrderedQueue(_RANK, lane) for name, lane in by_lane.items()}
        self._due = None
        if policy is Policy.DEADLINE:
            for sequence in sequences:
                sequence.due = _due_of(sequence)
            self._due = OrderedQueue(_DUE, [sequence for sequence in sequences if sequence.due])

    def put(self, sequence: SequenceState) -> None:
        self._want(sequence)
        name = self._lane(sequence)
        if name not in self._lanes:
            self._lanes[name] = OrderedQueue(_RANK)
        self._lanes[name].insert(sequence)
        if self._due is not None:
            sequence.due = _due_of(sequence)
            if sequence.due:
                self._due.insert(sequence)
        self._count(sequence, 1)

    def remove(self, sequence: SequenceState) -> None:
        """Removes a sequence, whose ``is_new`` must be the same as when it was added."""
        name = self._lane(sequence)
        lane = self._lanes[name]
        lane.remove(sequence)
        if not len(lane):
            del self._lanes[name]
        if self._due is not None and sequence.due:
            self._due.remove(sequence)
        self._count(sequence, -1)
        sequence.is_queued = False
        self._wanted.remove(sequence, sequence.hashes[: sequence.num_wanted])
        sequence.num_missing = sequence.num_evicted = sequence.num_stateless = 0

    def _want(self, sequence: SequenceState) -> None:
        """Finds out what the sequence lacks; ``_charge`` keeps it up to date."""
        sequence.num_wanted = sequence.num_missing = sequence.num_evicted = 0
        sequence.num_shared = sequence.num_stateless = 0
        if sequence.reads_cache and not sequence.pinned:  # pinned ones have all that they can find
            hashes = sequence.hashes[: (len(sequence.token_ids) - 1) // self._block_size]
            sequence.num_wanted = len(hashes)
            sequence.num_shared = self._wanted.add_owner(
                sequence, hashes, lambda other: cast(SequenceState, other).rank > sequence.rank
            )
            self._count_stateless(sequence)
        sequence.work = self._work(sequence)
        sequence.is_queued = True

    def _charge(self, owner: object, num_missing: int, num_evicted: int) -> None:
        sequence = cast(SequenceState, owner)
        sequence.num_missing += num_missing
        sequence.num_evicted += num_evicted
        if sequence.is_queued:
            if num_missing > 0 and sequence.num_stateless:  # they may be the same blocks
                self._count_stateless(sequence)
            self.update_work(sequence)

    def _state_changed(self, block_hash: bytes) -> None:
        sequence = cast(SequenceState | None, self._wanted.first(block_hash))
        if sequence is not None and sequence.is_queued:
            self._count_stateless(sequence)
            self.update_work(sequence)

    def _count_stateless(self, sequence: SequenceState) -> None:
        """Counts the blocks that the sequence computes again for lack of a state. If several need them, the first does,
        and the others begin with the state that it saves."""
        stateless = self._kv.find_stateless(sequence.hashes[: sequence.num_wanted])
        sequence.num_stateless = sum(self._wanted.first(block_hash) is sequence for block_hash in stateless)

    def update_work(self, sequence: SequenceState) -> None:
        """Updates the work of a waiting sequence after blocks have moved."""
        before, sequence.work = sequence.work, self._work(sequence)
        self._change_work(sequence, before)

    def unpinned(self, sequence: SequenceState) -> None:
        """Updates the work of a waiting sequence that has lost the blocks that it kept."""
        before, sequence.is_queued = sequence.work, False
        self._want(sequence)
        self._change_work(sequence, before)

    def _change_work(self, sequence: SequenceState, before: QueuedWork) -> None:
        change = sequence.work.minus(before)
        self._lanes[self._lane(sequence)].change_work(sequence, change)
        if self._due is not None and sequence.due:
            self._due.change_work(sequence, change)

    def _work(self, sequence: SequenceState) -> QueuedWork:
        live, num_tokens, size = sequence.live, len(sequence.token_ids), self._block_size
        num_at_hand = len(sequence.pinned)
        if sequence.num_wanted:
            num_at_hand = max(0, sequence.num_wanted - sequence.num_missing - sequence.num_stateless)
        return sequence_work(
            num_tokens,
            num_tokens - size * num_at_hand,
            size,
            is_pooled=sequence.is_pooled,
            num_forks=0 if live.forked else live.request.n - 1,
            num_evicted=sequence.num_evicted,
            num_shared=max(sequence.num_shared, len(sequence.pinned)),
        )

    def _count(self, sequence: SequenceState, sign: int) -> None:
        tenant = sequence.live.tenant
        self._num_sequences += sign
        tenant.num_waiting += sign
        if sequence.is_pooled:
            self.num_pooled += sign
        if sequence.live.request.is_warm_up:
            self.num_warm_ups += sign
        elif sequence.is_new:
            num_tokens = sequence.num_prompt_tokens
            if not sequence.index:
                num_tokens += len(sequence.live.request.prediction) + sequence.live.request.num_resumed_tokens
            change = (0 if sequence.index else sign, sign * num_tokens)
            self.queued = self.queued.plus(*change)
            self._own[tenant.name] = self.queued_of(tenant.name).plus(*change)
            if not any(self._own[tenant.name]):
                del self._own[tenant.name]

    @property
    def work(self) -> QueuedWork:
        return total_work([lane.work for lane in self._lanes.values()]).plus(self._unowned)

    def num_ahead(self, tenant: str, rank: Rank) -> int:
        """Returns how many sequences would be ahead of one that enters now; an approximation where tenants take
        turns."""
        return sum(num_sequences for _, num_sequences in self._ahead(tenant, rank))

    def num_own_ahead(self, tenant: str, rank: Rank) -> int:
        """Returns how many sequences of the tenant's lane would be ahead of one that enters now."""
        own = self._lanes.get(tenant if self.by_turns else "")
        return 0 if own is None else own.num_before(rank)

    def work_ahead(self, tenant: str, rank: Rank, deadline: float | None) -> QueuedWork:
        """Returns the work ahead of a sequence that enters now.

        Under the policy ``deadline`` long requests overtake short ones that are due sooner. If only sequences with less
        slack counted, more would be admitted than can be done in time. So the sequences that are due before it count,
        if there are more of them.
        """
        ahead = self._ahead(tenant, rank)
        if self._due is not None and deadline is not None:
            num_due = self._due.num_before((deadline, (math.inf, 0.0, 0, 0)))
            if num_due > sum(num_sequences for _, num_sequences in ahead):
                ahead = [(self._due, num_due)]
        return total_work([lane.work_of_first(num_sequences) for lane, num_sequences in ahead]).plus(self._unowned)

    def _ahead(self, tenant: str, rank: Rank) -> list[tuple[OrderedQueue, int]]:
        """Returns the lanes, each with the number of its first sequences that are ahead."""
        own = self._lanes.get(tenant if self.by_turns else "")
        num_own = self.num_own_ahead(tenant, rank)
        return [(lane, num_own if lane is own else min(len(lane), num_own + 1)) for lane in self._lanes.values()]

    @property
    def _unowned(self) -> QueuedWork:
        """The work for missing blocks that the first of several waiting sequences computes."""
        return QueuedWork(tokens=self._wanted.num_missing * self._block_size)

    def in_order(self, skipped: Container[TenantUse] = ()) -> Iterator[SequenceState]:
        """Iterates over all sequences in order, except those of skipped tenants where tenants take turns. Sequences and
        skipped tenants may be added meanwhile, and sequences removed; added sequences are not seen."""
        if len(self._lanes) <= 1:
            for sequence in chain.from_iterable([lane.snapshot() for lane in self._lanes.values()]):
                if self.by_turns and sequence.live.tenant in skipped:
                    return
                yield sequence
            return
        # A turn may change while its lane's first sequence is processed, so it is read again for the next one.
        lanes = [(self.order(lane.first), lane.snapshot()) for lane in self._lanes.values()]
        heap = [(order, next(sequences), sequences) for order, sequences in lanes]
        heapq.heapify(heap)
        while heap:
            _, choice, sequences = heap[0]
            if choice.live.tenant in skipped:
                heapq.heappop(heap)
                continue
            yield choice
            following = next(sequences, None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (self.order(following), following, sequences))

    def _lane(self, sequence: SequenceState) -> str:
        return sequence.live.tenant.name if self.by_turns else ""


def _due_of(sequence: SequenceState) -> tuple[float, Rank] | None:
    deadline = sequence.live.request.deadline
    return None if deadline is None else (deadline, sequence.rank)


class RunningQueue:
    """The sequences that have a row."""

    def __init__(self) -> None:
        self.prefilling: list[SequenceState] = []
        self.decoding: list[SequenceState] = []
        self.held: list[SequenceState] = []
        """Sequences of requests whose output is not read: in no plan until they are released."""

    @property
    def prefill_tokens_left(self) -> int:
        """The tokens that must be computed before the rows can decode."""
        return sum(row.prefill_end - row.num_planned for row in self.prefilling)

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding) + len(self.held)

    def __iter__(self) -> Iterator[SequenceState]:
        return chain(self.prefilling, self.decoding, self.held)

    def add_sequence(self, sequence: SequenceState) -> None:
        insort(self.prefilling, sequence, key=_RANK)
        sequence.live.tenant.num_rows += 1

    def promote(self, sequence: SequenceState) -> None:
        """Moves a sequence whose whole history is planned to the decoding ones."""
        self.prefilling.remove(sequence)
        insort(self.decoding, sequence, key=_RANK)
        sequence.state = SequenceStatus.DECODING

    def remove(self, sequence: SequenceState) -> None:
        (self.held if sequence.live.held else self._moving(sequence)).remove(sequence)
        sequence.live.tenant.num_rows -= 1

    def hold(self, sequence: SequenceState, held: bool) -> None:
        """Takes a row out of the plans, or puts it back. The caller then sets its request's ``held``."""
        (self._moving(sequence) if held else self.held).remove(sequence)
        insort(self.held if held else self._moving(sequence), sequence, key=_RANK)

    def arrange(self) -> None:
        """Sorts again, after ranks have changed."""
        for line in (self.prefilling, self.decoding, self.held):
            line.sort(key=_RANK)

    def _moving(self, sequence: SequenceState) -> list[SequenceState]:
        return self.prefilling if sequence.state is SequenceStatus.PREFILLING else self.decoding

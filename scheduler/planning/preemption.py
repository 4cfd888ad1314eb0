"""Decides which row is preempted when blocks or rows are short. It reads rows and their blocks, and takes none.

Rows whose output is not read go first. Then those that come after the needy one by the policy: the lowest priority, or
the tenant with the largest share for its weight; among them the one with the least to recompute.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from penstock.scheduler.executor import MAX_PLANS_IN_FLIGHT
from penstock.scheduler.planning.context import PlanningContext
from penstock.scheduler.planning.sequence import SequenceState
from penstock.scheduler.planning.tenants import TenantUse
from penstock.scheduler.policy import Policy, Rank


class PreemptionPolicy:
    """Chooses the row to preempt."""

    def __init__(self, policy: Policy, context: PlanningContext) -> None:
        self._policy = policy
        self._context = context
        self._running, self._kv, self._tenants = context.running, context.kv, context.tenants
        self._shares: dict[TenantUse, float] = {}
        """The tenants' dominant shares when the plan began. They stay until the next plan; otherwise two rows could
        preempt each other."""

    def rows_to_plan(self, step: int) -> list[SequenceState]:
        """Returns the decoding rows that a step continues, in order; do not change the list. Under ``fair``, rows of
        the tenant with the smallest share come first, so that rows of one with a large share can still be preempted."""
        decoding = self._running.decoding
        if self._context.facts.pipeline_parallel_size > 1:
            decoding = in_turn(decoding, step, self._context.facts.pipeline_parallel_size)
        if self._policy is not Policy.FAIR:
            return decoding
        self._shares = self._dominant_shares()
        return sorted(decoding, key=self._order)

    def _order(self, sequence: SequenceState) -> tuple[float, Rank]:
        return (self._share(sequence), sequence.rank)

    def _share(self, sequence: SequenceState) -> float:
        return self._shares.get(sequence.live.tenant, 0.0)

    def _dominant_shares(self) -> dict[TenantUse, float]:
        """Returns each tenant's share of the running rows or of the blocks, whichever is larger, for its weight (Ghodsi
        et al., "Dominant Resource Fairness", NSDI 2011)."""
        num_rows, num_blocks = max(1, len(self._running)), self._kv.pool.num_blocks
        return {
            use: max(use.num_rows / num_rows, held / num_blocks) / use.limits.weight
            for use, held in self._blocks_held().items()
        }

    def _blocks_held(self) -> Counter[TenantUse]:
        held = Counter[TenantUse]()
        for sequence in self._running:
            held[sequence.live.tenant] += sequence.num_held
        return held

    def victim_for_decode(self, needy: SequenceState, unplanned: Iterable[SequenceState]) -> SequenceState:
        """Returns the row whose blocks a decoding row takes: itself, if no row comes after it. ``unplanned``: the
        decoding rows that are not in the plan yet. Rows in the plan are never preempted."""
        running = self._running
        if running.held:
            return self._cheapest(running.held)
        own = self._order(needy)
        later = [row for row in chain(running.prefilling, unplanned) if self._order(row) > own]
        return self._cheapest(self._last(later)) if later else needy

    def victim_for_chunk(self) -> SequenceState | None:
        """Returns the row whose blocks go to histories of which nothing can be computed for lack of them; None if some
        will be free without that, or if there is no row to spare."""
        running = self._running
        if running.held:
            return self._cheapest(running.held)
        if running.decoding or len(running.prefilling) < 2:
            return None
        return max(running.prefilling, key=self._order)

    @property
    def makes_room(self) -> bool:
        """Whether any row might be preempted for a waiting sequence."""
        return bool(self._running.held) or self._policy in (Policy.PRIORITY, Policy.FAIR)

    def would_make_room(self, tenant: str, rank: Rank) -> bool:
        """Returns whether a row would be preempted for a request that has yet to arrive, with no other request of its
        tenant ahead of it."""
        if self._policy is Policy.PRIORITY:
            return any(sequence.rank[0] > rank[0] for sequence in self._running)
        if self._policy is not Policy.FAIR:
            return False
        tenants, num_rows = self._tenants, min(self._context.max_rows, len(self._running) + 1)
        if tenants.num_rows(tenant) + 1 > max(1.0, num_rows * tenants.share_of(tenant)):
            return False
        return any(
            use.num_rows > 1 and use.num_rows - 1 >= num_rows * tenants.share_beside(use, tenant) for use in tenants
        )

    def victim_for_waiting(self, sequence: SequenceState, num_blocks: int) -> SequenceState | None:
        """Returns the row to preempt for a sequence that waits for ``num_blocks`` or for a row; None if there is none,
        or if it would not be enough."""
        if self._running.held:
            return self._cheapest(self._running.held)
        inferior = self._after(sequence, num_blocks)
        pool = self._kv.pool
        if not inferior or pool.num_free + pool.num_freed(other.held_blocks for other in inferior) < num_blocks:
            return None
        return self._cheapest(self._last(inferior))

    def _after(self, waiting: SequenceState, num_blocks: int) -> list[SequenceState]:
        """Returns the rows that come after a sequence that waits for ``num_blocks`` or for a row."""
        if self._policy is Policy.PRIORITY:
            return [sequence for sequence in self._running if sequence.rank[0] > waiting.rank[0]]
        if self._policy is not Policy.FAIR:
            return []
        # A tenant below its share takes from a tenant above its share, and only up to its share, so no row goes back
        # and forth.
        num_rows = min(self._context.max_rows, len(self._running) + 1)
        poor, share = waiting.live.tenant, self._tenants.share
        rich: set[TenantUse] = set()
        if poor.num_rows + 1 <= max(1.0, num_rows * share(poor)):
            rich = {use for use in self._tenants if use.num_rows > 1 and use.num_rows - 1 >= num_rows * share(use)}
        pool, held = self._kv.pool, self._blocks_held()
        if pool.num_free < num_blocks and held[poor] + num_blocks <= pool.num_blocks * share(poor):
            rich.update(use for use in held if held[use] > pool.num_blocks * share(use))
        if not rich:
            return []
        self._shares = self._dominant_shares()
        return [sequence for sequence in self._running if sequence.live.tenant in rich]

    def _last(self, sequences: Iterable[SequenceState]) -> list[SequenceState]:
        """Returns the rows to preempt first."""
        match self._policy:
            case Policy.PRIORITY:
                placed = [(float(sequence.rank[0]), sequence) for sequence in sequences]
            case Policy.FAIR:
                placed = [(self._share(sequence), sequence) for sequence in sequences]
            case _:
                return list(sequences)
        highest = max(value for value, _ in placed)
        return [sequence for value, sequence in placed if value == highest]

    def _cheapest(self, sequences: Iterable[SequenceState]) -> SequenceState:
        """Returns the row with the least to recompute."""
        return min(sequences, key=lambda sequence: (self._num_lost(sequence), -sequence.rank[2]))

    def _num_lost(self, sequence: SequenceState) -> int:
        """Returns the number of blocks that a row may have to compute again: those that it shares with no other row.
        With recurrent layers, it begins after a saved state, and with windows where they are found. So the number is
        twice the mean of what it computes again if all of these blocks are evicted, and if none is."""
        kv, num_blocks = self._kv, len(sequence.block_ids)
        num_shared = num_blocks - kv.pool.num_unshared(sequence.block_ids)
        return sum(num_blocks - kv.num_usable(sequence.hashes, num) for num in (num_shared, num_blocks))


def in_turn(decoding: Sequence[SequenceState], step: int, num_stages: int) -> list[SequenceState]:
    """Returns the rows that a step continues if the model has stages: about one of ``num_stages`` groups, so that every
    stage has a step to compute. A row whose last token is still on its way through the stages leaves its turn to
    others, since the step would wait for it, and all later steps with it. Rows that need no more tokens stay."""
    unfinished = [row for row in decoding if row.length_bound < row.length_limit]
    free = [row for row in unfinished if not row.in_flight or row.planned_at <= step - num_stages]
    if not free:  # a step that waits in the worker starts sooner than one that waits for a result here
        free = [row for row in unfinished if len(row.in_flight) < MAX_PLANS_IN_FLIGHT]
    chosen = sorted(free, key=lambda row: row.planned_at)[: -(-len(unfinished) // num_stages)]
    turn = set(chosen)
    return [row for row in decoding if row in turn or row.length_bound >= row.length_limit]

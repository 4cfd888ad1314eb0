"""Which row gives way when blocks or rows are short. Knows rows and their blocks, and takes none.

Rows whose output nobody reads go first. Then those that come after whoever is in need, by the policy: the lowest
priority, or the tenant with the most rows for its weight; among them the one that has the least to compute again.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from penstock.kv.manager import KVCacheManager
from penstock.scheduler.choice import Choice, ChoiceState
from penstock.scheduler.lineup import RunningRows
from penstock.scheduler.policy import Policy, Rank
from penstock.scheduler.tenants import Tenants


def _alike(choice: Choice) -> float:
    return 0.0


def _priority(choice: Choice) -> float:
    return choice.rank[0]


def _excess(choice: Choice) -> float:
    return choice.live.tenant.num_rows / choice.live.tenant.limits.weight


_PLACE: dict[Policy, Callable[[Choice], float]] = {
    Policy.FCFS: _alike,
    Policy.PRIORITY: _priority,
    Policy.DEADLINE: _alike,
    Policy.FAIR: _excess,
}
"""Those with the highest give way first."""


class GivingWay:
    """Chooses who."""

    def __init__(self, policy: Policy, running: RunningRows, kv: KVCacheManager, tenants: Tenants) -> None:
        self._policy = policy
        self._running = running
        self._kv = kv
        self._tenants = tenants

    def order(self, choice: Choice) -> tuple[float, Rank]:
        """Returns the order in which decoding rows are planned. Under ``fair``, rows of the tenant with the fewest rows
        for its weight come first, so that the rows of one with many are still there to give way."""
        return (_excess(choice) if self._policy is Policy.FAIR else 0.0, choice.rank)

    def for_row(self, needy: Choice, not_planned: Sequence[Choice]) -> Choice:
        """Returns the row whose blocks a decoding row takes: itself, if no row comes after it. ``not_planned``: the
        decoding rows that were not in the plan yet, some of which may have given way since; rows in the plan never
        do."""
        running = self._running
        if running.held:
            return self._cheapest(running.held)
        own = self.order(needy)
        unplanned = chain(running.prefilling, (row for row in not_planned if row.state is ChoiceState.DECODING))
        later = [choice for choice in unplanned if self.order(choice) > own]
        return self._cheapest(self._last(later)) if later else needy

    @property
    def makes_room(self) -> bool:
        """Whether any row might give way to one that waits."""
        return bool(self._running.held) or self._policy in (Policy.PRIORITY, Policy.FAIR)

    def would_make_room(self, tenant: str, rank: Rank, max_rows: int) -> bool:
        """Whether a row would give way to a request that is still to come, with nobody of its own ahead of it."""
        if self._policy is Policy.PRIORITY:
            return any(choice.rank[0] > rank[0] for choice in self._running)
        if self._policy is not Policy.FAIR:
            return False
        tenants, num_rows = self._tenants, min(max_rows, len(self._running) + 1)
        if tenants.num_rows(tenant) + 1 > max(1.0, num_rows * tenants.share_of(tenant)):
            return False
        return any(
            use.num_rows > 1 and use.num_rows - 1 >= num_rows * tenants.share_beside(use, tenant) for use in tenants
        )

    def for_waiting(self, choice: Choice, num_blocks: int, max_rows: int) -> Choice | None:
        """Who gives way to a choice that waits for ``num_blocks`` or for one of ``max_rows``; None if nobody has to, or
        if it would not be enough."""
        if self._running.held:
            return self._cheapest(self._running.held)
        inferior = self._after(choice, max_rows)
        pool = self._kv.pool
        if not inferior or pool.num_free + pool.num_freed(other.block_ids for other in inferior) < num_blocks:
            return None
        return self._cheapest(self._last(inferior))

    def _after(self, waiting: Choice, max_rows: int) -> list[Choice]:
        """The rows that come after a choice that waits."""
        if self._policy is Policy.PRIORITY:
            return [choice for choice in self._running if choice.rank[0] > waiting.rank[0]]
        if self._policy is not Policy.FAIR:
            return []
        # A tenant with fewer rows than its share takes one from a tenant with more than its own, and never more than
        # that, so no row goes to and fro.
        num_rows = min(max_rows, len(self._running) + 1)
        poor, share = waiting.live.tenant, self._tenants.share
        if poor.num_rows + 1 > max(1.0, num_rows * share(poor)):
            return []
        rich = {use for use in self._tenants if use.num_rows > 1 and use.num_rows - 1 >= num_rows * share(use)}
        return [choice for choice in self._running if choice.live.tenant in rich] if rich else []

    def _last(self, choices: Iterable[Choice]) -> list[Choice]:
        place = _PLACE[self._policy]
        placed = [(place(choice), choice) for choice in choices]
        highest = max(value for value, _ in placed)
        return [choice for value, choice in placed if value == highest]

    def _cheapest(self, choices: Iterable[Choice]) -> Choice:
        """The one that shares the most of its blocks, or has the fewest, has the least to compute again."""
        return min(choices, key=lambda choice: (self._kv.num_unshared(choice.block_ids), -choice.rank[1]))

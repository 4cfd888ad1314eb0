"""Who waits, who runs and who is held back, each in order. Knows neither blocks nor plans.

The order is that of ranks; where tenants take turns it is that of their turns first, which move with every step.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from penstock.scheduler.choice import Choice, ChoiceState
from penstock.scheduler.policy import Rank

Order = tuple[float, Rank]
"""(the tenant's turn, or 0 where tenants take none; the rank)."""


def _rank(choice: Choice) -> Rank:
    return choice.rank


class Queued(NamedTuple):
    """How much waits: requests whose first prompt has not begun, and the tokens of all prompts that have not."""

    requests: int
    tokens: int


_NOTHING = Queued(0, 0)


class WaitingQueue:
    """Choices without a row: new ones, forked ones, preempted ones."""

    def __init__(self, by_turns: bool) -> None:
        """``by_turns``: tenants take turns."""
        self.by_turns = by_turns
        self.num_requests = 0
        """Requests whose first prompt has not begun."""
        self.num_tokens = 0
        """Of all prompts that have not begun."""
        self.num_pooled = 0
        """Choices that are pooled, which have a row for as long as their prompts take."""
        self.num_pooled_tokens = 0
        """Of those of their prompts that have not begun."""
        self._num_choices = 0
        self._own: dict[str, Queued] = {}
        """Of each tenant that has any: counted as they come and go, since there may be many."""
        self._lanes: dict[str, list[Choice]] = {}
        """One for each tenant, or one for all; none is empty."""

    def __len__(self) -> int:
        return self._num_choices

    def __iter__(self) -> Iterator[Choice]:
        """In any order."""
        return chain.from_iterable(self._lanes.values())

    @property
    def queued(self) -> Queued:
        """Of everybody."""
        return Queued(self.num_requests, self.num_tokens)

    def queued_of(self, tenant: str) -> Queued:
        """Of a tenant."""
        return self._own.get(tenant, _NOTHING)

    def order(self, choice: Choice) -> Order:
        """What a choice is ordered by now."""
        return (choice.live.tenant.turn if self.by_turns else 0.0, choice.rank)

    def arrange(self, by_turns: bool) -> None:
        """Ranks have changed, or whether tenants take turns."""
        choices = sorted(self, key=_rank)
        self.by_turns = by_turns
        self._lanes = {}
        for choice in choices:
            self._lanes.setdefault(self._lane(choice), []).append(choice)

    def put(self, choice: Choice) -> None:
        """Enters a choice."""
        insort(self._lanes.setdefault(self._lane(choice), []), choice, key=_rank)
        self._count(choice, 1)

    def remove(self, choice: Choice) -> None:
        """Takes a choice out, while it is still as new as it was."""
        name = self._lane(choice)
        lane = self._lanes[name]
        # Ranks are unique, so this finds it without comparing all of a long queue.
        index = bisect_left(lane, choice.rank, key=_rank)
        assert lane[index] is choice
        del lane[index]
        if not lane:
            del self._lanes[name]
        self._count(choice, -1)

    def _count(self, choice: Choice, sign: int) -> None:
        new_tokens = sign * choice.num_prompt_tokens if choice.is_new else 0
        self._num_choices += sign
        choice.live.tenant.num_waiting += sign
        self.num_tokens += new_tokens
        if choice.is_new:
            num_first = sign if choice.index == 0 else 0
            self.num_requests += num_first
            self._count_own(choice.live.tenant.name, num_first, new_tokens)
        if choice.is_pooled:
            self.num_pooled += sign
            self.num_pooled_tokens += new_tokens

    def _count_own(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        before = self.queued_of(tenant)
        after = Queued(before.requests + num_requests, before.tokens + num_tokens)
        if any(after):
            self._own[tenant] = after
        else:
            self._own.pop(tenant, None)

    def num_ahead(self, tenant: str, rank: Rank) -> int:
        """How many would be ahead of a choice that entered now; with turns, about so many."""
        own = self._lanes.get(tenant if self.by_turns else "", [])
        ahead = bisect_left(own, rank, key=_rank)
        if self.by_turns:
            ahead += sum(min(len(lane), ahead + 1) for name, lane in self._lanes.items() if name != tenant)
        return ahead

    def in_order(self) -> Iterator[Choice]:
        """All of them. Choices may be put and removed meanwhile: those that enter are not seen."""
        if len(self._lanes) <= 1:
            for lane in list(self._lanes.values()):
                yield from tuple(lane)
            return
        # A turn may move while its lane's first is looked at, so it is read again for the next one.
        lanes = [(self.order(lane[0]), iter(tuple(lane))) for lane in self._lanes.values()]
        heap = [(order, next(choices), choices) for order, choices in lanes]
        heapq.heapify(heap)
        while heap:
            _, choice, choices = heap[0]
            yield choice
            following = next(choices, None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (self.order(following), following, choices))

    def _lane(self, choice: Choice) -> str:
        return choice.live.tenant.name if self.by_turns else ""


class RunningRows:
    """Choices with a row."""

    def __init__(self) -> None:
        self.prefilling: list[Choice] = []
        self.decoding: list[Choice] = []
        self.held: list[Choice] = []
        """Of requests whose output nobody reads: in no plan until they are released."""

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding) + len(self.held)

    def __iter__(self) -> Iterator[Choice]:
        return chain(self.prefilling, self.decoding, self.held)

    def add(self, choice: Choice) -> None:
        """Enters a choice whose row begins."""
        insort(self.prefilling, choice, key=_rank)
        choice.live.tenant.num_rows += 1

    def promote(self, choice: Choice) -> None:
        """All of its history is planned."""
        self.prefilling.remove(choice)
        insort(self.decoding, choice, key=_rank)
        choice.state = ChoiceState.DECODING

    def remove(self, choice: Choice) -> None:
        """Takes a choice out."""
        self._line(choice).remove(choice)
        choice.live.tenant.num_rows -= 1

    def hold(self, choice: Choice, held: bool) -> None:
        """Takes a row out of the plans, or puts it back; its request says the same from now on."""
        (self._moving(choice) if held else self.held).remove(choice)
        insort(self.held if held else self._moving(choice), choice, key=_rank)

    def arrange(self) -> None:
        """Ranks have changed."""
        for line in (self.prefilling, self.decoding, self.held):
            line.sort(key=_rank)

    def _line(self, choice: Choice) -> list[Choice]:
        return self.held if choice.live.held else self._moving(choice)

    def _moving(self, choice: Choice) -> list[Choice]:
        return self.prefilling if choice.state is ChoiceState.PREFILLING else self.decoding

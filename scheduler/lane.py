"""A sorted line of waiting choices that knows how much work its first ones are, without looking at each of them."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from penstock.scheduler.choice import Choice

_PART = 64
"""Choices in a part of a lane: at most twice as many, and their work is summed for the whole part."""


class QueuedWork(NamedTuple):
    """What waiting sequences need before they can decode; sums, where there are several."""

    rows: float = 0
    """Those that will decode, forks that do not exist yet included."""
    pooled: float = 0
    """Those that are embedded: they need a row only until their prompt is computed."""
    tokens: float = 0
    """To be computed: tokens of histories that are neither cached nor computed for a sequence before this one."""
    kv: float = 0
    """How many tokens each of these attends to, summed."""
    context: float = 0
    """Lengths of the histories of the ``rows``."""
    pooled_context: float = 0
    """Lengths of the histories of the ``pooled``."""
    evicted_blocks: float = 0
    """To be copied back from the host tier."""
    new_blocks: float = 0
    """Blocks of histories, those that are shared with a running sequence or one before this one left out."""

    @property
    def chunks(self) -> float:
        """Chunks of histories, if none is split."""
        return self.rows + self.pooled

    @property
    def length(self) -> float:
        """The mean length of a history."""
        return (self.context + self.pooled_context) / max(1, self.chunks)

    def plus(self, other: "QueuedWork") -> "QueuedWork":
        """The sum of both."""
        return QueuedWork(*map(add, self, other))

    def minus(self, other: "QueuedWork") -> "QueuedWork":
        """The rest without the other."""
        return QueuedWork(*[mine - its for mine, its in zip(self, other, strict=True)])


NO_WORK = QueuedWork()


def total_work(works: Iterable[QueuedWork]) -> QueuedWork:
    """The sum of all."""
    columns = list(zip(*works, strict=True))
    return QueuedWork(*map(sum, columns)) if columns else NO_WORK


def sequence_work(
    num_tokens: int,
    num_new_tokens: int,
    block_size: int,
    *,
    is_pooled: bool = False,
    num_forks: int = 0,
    num_evicted: int = 0,
    num_shared: int = 0,
) -> QueuedWork:
    """The work of one sequence of ``num_tokens``, of which the last ``num_new_tokens`` have to be computed, and of its
    forks. ``num_shared`` of its blocks take no room of their own."""
    # The last token is always computed.
    num_new_tokens = max(1, num_new_tokens)
    work = QueuedWork(
        rows=0 if is_pooled else 1,
        pooled=int(is_pooled),
        tokens=num_new_tokens,
        kv=num_new_tokens * (num_tokens - num_new_tokens / 2),
        context=0 if is_pooled else num_tokens,
        pooled_context=num_tokens if is_pooled else 0,
        evicted_blocks=num_evicted,
        new_blocks=-(-num_tokens // block_size) - num_shared,
    )
    return work.plus(fork_work(num_tokens, num_forks, block_size)) if num_forks else work


def fork_work(num_tokens: int, num_forks: int, block_size: int) -> QueuedWork:
    """The work of the other choices of a request whose prompt has ``num_tokens``: they share its full blocks, and each
    computes the last one again."""
    tokens = num_forks * (1 + (num_tokens - 1) % block_size)
    return QueuedWork(
        rows=num_forks, tokens=tokens, kv=tokens * num_tokens, context=num_forks * num_tokens, new_blocks=num_forks
    )


class Lane:
    """Choices in the order of a key, which is unique and stands still while they are here."""

    def __init__(self, key: Callable[["Choice"], Any], choices: Iterable["Choice"] = ()) -> None:
        self._key = key
        ordered = sorted(choices, key=key)
        self._parts = [ordered[start : start + _PART] for start in range(0, len(ordered), _PART)]
        self._works = [total_work(choice.work for choice in part) for part in self._parts]
        self._num_choices = len(ordered)
        self.work = total_work(self._works)
        """Of all of them."""

    def __len__(self) -> int:
        return self._num_choices

    def __iter__(self) -> Iterator["Choice"]:
        return chain.from_iterable(self._parts)

    def snapshot(self) -> Iterator["Choice"]:
        """Those that are here now, whatever comes and goes while they are looked at."""
        return chain.from_iterable([tuple(part) for part in self._parts])

    @property
    def first(self) -> "Choice":
        """The first one; there must be one."""
        return self._parts[0][0]

    def insert(self, choice: "Choice") -> None:
        """Puts a choice in its place."""
        index = min(self._part_of(self._key(choice)), len(self._parts) - 1)
        if index < 0:
            self._parts.append([])
            self._works.append(NO_WORK)
            index = 0
        part = self._parts[index]
        insort(part, choice, key=self._key)
        self._num_choices += 1
        self._add(index, choice.work)
        if len(part) > 2 * _PART:
            halves = [part[:_PART], part[_PART:]]
            self._parts[index : index + 1] = halves
            self._works[index : index + 1] = [total_work(choice.work for choice in half) for half in halves]

    def remove(self, choice: "Choice") -> None:
        """Takes a choice out."""
        value = self._key(choice)
        index = self._part_of(value)
        part = self._parts[index]
        place = bisect_left(part, value, key=self._key)
        assert part[place] is choice
        del part[place]
        self._num_choices -= 1
        if part:
            self._add(index, NO_WORK.minus(choice.work))
        else:
            del self._parts[index], self._works[index]
            self.work = self.work.minus(choice.work) if self._parts else NO_WORK

    def change_work(self, choice: "Choice", change: QueuedWork) -> None:
        """The work of a choice in the lane has changed by so much."""
        self._add(self._part_of(self._key(choice)), change)

    def num_before(self, value: Any) -> int:
        """How many choices have a lower key."""
        index = self._part_of(value)
        if index == len(self._parts):
            return self._num_choices
        return sum(map(len, self._parts[:index])) + bisect_left(self._parts[index], value, key=self._key)

    def work_of_first(self, num_choices: int) -> QueuedWork:
        """The work of the first ones together."""
        if num_choices >= self._num_choices:
            return self.work
        work = NO_WORK
        for part, part_work in zip(self._parts, self._works, strict=True):
            if num_choices < len(part):
                return work.plus(total_work(choice.work for choice in part[:num_choices]))
            work = work.plus(part_work)
            num_choices -= len(part)
        return work

    def _part_of(self, value: Any) -> int:
        """The part that a key belongs to; their number, if it comes after all."""
        return bisect_left(self._parts, value, key=lambda part: self._key(part[-1]))

    def _add(self, index: int, work: QueuedWork) -> None:
        self._works[index] = self._works[index].plus(work)
        self.work = self.work.plus(work)

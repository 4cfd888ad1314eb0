"""Tracks which free blocks are kept in preference to others, until when, and for which owner.

A lease covers the blocks of one sequence, from its beginning. While a block is covered by a lease, it stays. If leases
cover more than there is room for, whole sequences are given up, tails first: that keeps more than a part of each would,
since every one of them would then lack its end. First goes the one that is expected back last, which is the one whose
lease ends last; the sequences that wait in the queue come after all others. It knows neither hashes nor requests.
"""

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, KeysView, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

_ORDER = attrgetter("order")


class Lease:
    """Keeps a sequence's blocks for ``owner`` until ``until``, by ``time.monotonic()``."""

    def __init__(self, blocks: Sequence[int], until: float, owner: str, order: Any) -> None:
        """Of two leases of a kind, the one with the higher ``order``, which is unique, gives up its blocks first."""
        self.blocks = list(blocks)
        """In the order of the sequence. Blocks are given up from the end."""
        self.until = until
        self.owner = owner
        self.order = order


class Retention:
    """The leases, and the blocks that they keep."""

    def __init__(self, max_blocks_per_owner: int, is_held: Callable[[int], bool]) -> None:
        self._max_blocks_per_owner = max_blocks_per_owner
        self._is_held = is_held
        self._paused: list[Lease] = []
        """By the ends of the leases. There are few: one for each conversation that pauses."""
        self._awaited: list[Lease] = []
        """Those of sequences that wait in the queue, by its order."""
        self._tips: dict[int, Lease] = {}
        """The paused lease whose last block this is; at most one."""
        self._num_covers: dict[int, int] = {}
        """By how many leases a block is covered, held or not."""
        self._owners: dict[int, str] = {}
        self.num_blocks = 0
        """Covered blocks that are not held."""
        self._num_by_owner: Counter[str] = Counter()
        self._above_bound: set[str] = set()
        self._num_leases = 0

    @property
    def covered(self) -> KeysView[int]:
        """The blocks under a lease, held or not."""
        return self._num_covers.keys()

    def covers(self, block: int) -> bool:
        return block in self._num_covers

    def hold(self, block: int) -> None:
        """Records that a covered block is held from now on."""
        self._count(block, -1)

    def drop_hold(self, block: int) -> None:
        """Records that a covered block is no longer held."""
        self._count(block, 1)

    def add_paused(self, blocks: Sequence[int], until: float, owner: str) -> None:
        """Adds the lease of a sequence that pauses. It takes the place of leases on a beginning of the sequence that
        end no later."""
        self._num_leases += 1
        lease = Lease(blocks, until, owner, (until, self._num_leases))
        self._cover(lease)
        for block in blocks:
            earlier = self._tips.get(block)
            if earlier is not None and earlier.until <= until:
                self._end(earlier)
        self._list(lease)

    def add_awaited(self, blocks: Sequence[int], owner: str, order: Any) -> Lease:
        """Adds and returns the lease of a sequence that waits in the queue, at the place ``order``."""
        self._num_leases += 1
        lease = Lease(blocks, math.inf, owner, (order, self._num_leases))
        self._cover(lease)
        insort(self._awaited, lease, key=_ORDER)
        return lease

    def end_awaited(self, lease: Lease) -> list[int]:
        """Ends a lease of ``add_awaited``. Returns the blocks that no lease keeps any more, in the order in which they
        are to be given up."""
        if lease.blocks:
            _remove(self._awaited, lease)
        return self._uncover(lease, len(lease.blocks))

    def give_up(self, block: int, owner: str) -> list[int]:
        """Ends the lease of ``owner`` on this block, if it is the last of a paused sequence: the lease keeps those
        before it. Returns the blocks as ``end_awaited`` does."""
        lease = self._tips.get(block)
        return self._shorten(lease) if lease is not None and lease.owner == owner else []

    def pop(self) -> int:
        """Gives up blocks until one of them is free; returns it. There must be one."""
        while True:
            freed = self._shorten((self._paused or self._awaited)[-1])
            if freed:
                return freed[0]

    def pop_expired(self, now: float) -> list[int]:
        """Ends the leases that have expired. Returns the blocks as ``end_awaited`` does."""
        expired: list[int] = []
        while self._paused and self._paused[0].until <= now:
            expired += self._end(self._paused[0])
        return expired

    def pop_all_excess(self) -> list[int]:
        """Gives up the blocks above the owners' bounds. Returns the blocks as ``end_awaited`` does."""
        excess: list[int] = []
        while self._above_bound:
            owner = self._above_bound.pop()
            while self._num_by_owner[owner] > self._max_blocks_per_owner:
                last = chain(reversed(self._paused), reversed(self._awaited))
                lease = next(lease for lease in last if lease.owner == owner)
                while lease.blocks and self._num_by_owner[owner] > self._max_blocks_per_owner:
                    excess += self._shorten(lease)
        return excess

    def clear(self) -> list[int]:
        """Ends all leases, those of waiting sequences included; returns the blocks that were retained."""
        retained = [block for block in self._num_covers if not self._is_held(block)]
        for lease in chain(self._paused, self._awaited):
            lease.blocks.clear()
        for each in (self._paused, self._awaited, self._tips, self._num_covers, self._owners, self._num_by_owner):
            each.clear()
        self._above_bound.clear()
        self.num_blocks = 0
        return retained

    def check(self) -> None:
        """Asserts that the leases are consistent with each other, with the counts and with the bound."""
        for leases in (self._paused, self._awaited):
            assert all(lease.blocks for lease in leases), "a lease that keeps no block is listed"
            assert leases == sorted(leases, key=_ORDER), "leases are out of order"
        assert self._tips == {lease.blocks[-1]: lease for lease in self._paused}, "a tip is that of another lease"
        covers = Counter(chain.from_iterable(lease.blocks for lease in chain(self._paused, self._awaited)))
        assert covers == self._num_covers, "the counts of leases differ from the leases"
        assert self._owners.keys() == covers.keys(), "a block that is not covered has an owner"
        counts = Counter(self._owners[block] for block in covers if not self._is_held(block))
        assert counts == self._num_by_owner, "the owners' counts differ from their leases"
        assert counts.total() == self.num_blocks, "the count of retained blocks differs from the leases"
        assert all(count <= self._max_blocks_per_owner for count in counts.values()), "an owner is above its bound"

    def _shorten(self, lease: Lease) -> list[int]:
        """Takes the last block from a lease; returns it if it is free now."""
        if self._tips.get(lease.blocks[-1]) is not lease:
            freed = self._uncover(lease, 1)
            if not lease.blocks:
                _remove(self._awaited, lease)
            return freed
        del self._tips[lease.blocks[-1]]
        _remove(self._paused, lease)
        freed = self._uncover(lease, 1)
        if lease.blocks:
            self._list(lease)
        return freed

    def _list(self, lease: Lease) -> None:
        """Lists a paused lease, unless another one on the same blocks ends later, or in its place."""
        other = self._tips.get(lease.blocks[-1])
        if other is not None:
            if other.order > lease.order:
                self._uncover(lease, len(lease.blocks))
                return
            self._end(other)
        self._tips[lease.blocks[-1]] = lease
        insort(self._paused, lease, key=_ORDER)

    def _end(self, lease: Lease) -> list[int]:
        """Ends a paused lease."""
        _remove(self._paused, lease)
        del self._tips[lease.blocks[-1]]
        return self._uncover(lease, len(lease.blocks))

    def _cover(self, lease: Lease) -> None:
        covers = self._num_covers
        for block in lease.blocks:
            if block in covers:
                covers[block] += 1
            else:
                covers[block] = 1
                self._owners[block] = lease.owner
                if not self._is_held(block):
                    self._count(block, 1)

    def _uncover(self, lease: Lease, num_blocks: int) -> list[int]:
        """Takes the last blocks from a lease; returns those that are neither held nor covered now."""
        covers, freed = self._num_covers, []
        for _ in range(num_blocks):
            block = lease.blocks.pop()
            covers[block] -= 1
            if not covers[block]:
                del covers[block]
                if not self._is_held(block):
                    self._count(block, -1)
                    freed.append(block)
                del self._owners[block]
        return freed

    def _count(self, block: int, sign: int) -> None:
        owner = self._owners[block]
        self.num_blocks += sign
        self._num_by_owner[owner] += sign
        if self._num_by_owner[owner] > self._max_blocks_per_owner:
            self._above_bound.add(owner)
        if not self._num_by_owner[owner]:
            del self._num_by_owner[owner]


def _remove(leases: list[Lease], lease: Lease) -> None:
    at = bisect_left(leases, lease.order, key=_ORDER)
    assert leases[at] is lease
    del leases[at]

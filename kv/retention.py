"""Tracks which free blocks are kept in preference to others, until when, and for which owner.

It knows neither reference counts nor hashes. The block with the nearest expiry is given up first; within a lease, the
block that was added first. An owner that has more than its share goes before all others.
"""

from bisect import insort
from collections import Counter, OrderedDict
from enum import Enum, auto
from operator import attrgetter

_EXPIRY = attrgetter("expiry")


class LeaseKind(Enum):
    """Why blocks are kept."""

    CONTEXT = auto()
    """A sequence that ended may be continued."""
    AHEAD = auto()
    """They were computed ahead for an expected sequence."""


class Lease:
    """Keeps a sequence's blocks for ``owner`` until ``until``, by ``time.monotonic()``."""

    def __init__(self, until: float, owner: str, number: int, kind: LeaseKind = LeaseKind.CONTEXT) -> None:
        """Among leases that expire at the same time, the one with the lower ``number`` gives up its blocks first."""
        self.until = until
        self.owner = owner
        self.kind = kind
        self.expiry = (until, number)
        self.blocks: OrderedDict[int, None] = OrderedDict()
        """The blocks that are not held, in the order in which they are given up. Not a plain dict: that would walk over
        its deleted beginning each time."""


class Retention:
    """The leases that keep blocks, and the number of blocks per owner."""

    def __init__(self, share: int) -> None:
        """An owner of more than ``share`` blocks is dominant. ``share`` is at least half of all blocks, so only one
        owner can be."""
        self._share = share
        # Leases with blocks, by expiry. There are few of them: one for each conversation that pauses.
        self._leases: list[Lease] = []
        self._of_owner: dict[str, list[Lease]] = {}
        self.num_blocks = 0
        self._num_by_owner: Counter[str] = Counter()
        self.dominant: str | None = None
        """The owner with more than its share."""

    def put(self, block: int, lease: Lease) -> None:
        if not lease.blocks:
            for leases in (self._leases, self._of_owner.setdefault(lease.owner, [])):
                insort(leases, lease, key=_EXPIRY)
        lease.blocks[block] = None
        self._count(lease.owner, 1)

    def remove(self, block: int, lease: Lease) -> None:
        del lease.blocks[block]
        self._count(lease.owner, -1)
        if not lease.blocks:
            own = self._of_owner[lease.owner]
            for leases in (self._leases, own):
                leases.remove(lease)
            if not own:
                del self._of_owner[lease.owner]

    def _count(self, owner: str, sign: int) -> None:
        self.num_blocks += sign
        self._num_by_owner[owner] += sign
        if self._num_by_owner[owner] > self._share:
            self.dominant = owner
        elif self.dominant == owner:
            self.dominant = None
        if not self._num_by_owner[owner]:
            del self._num_by_owner[owner]

    def pop(self) -> int:
        """Removes and returns the block with the nearest expiry, of the dominant owner if there is one."""
        lease = (self._leases if self.dominant is None else self._of_owner[self.dominant])[0]
        block = next(iter(lease.blocks))
        self.remove(block, lease)
        return block

    def pop_expired(self, now: float) -> list[int]:
        """Removes and returns the blocks whose leases have expired, in the order of ``pop``."""
        expired = []
        while self._leases and self._leases[0].until <= now:
            block = next(iter(self._leases[0].blocks))
            self.remove(block, self._leases[0])
            expired.append(block)
        return expired

    def clear(self) -> None:
        for lease in self._leases:
            lease.blocks.clear()
        self._leases.clear()
        self._of_owner.clear()
        self._num_by_owner.clear()
        self.dominant = None
        self.num_blocks = 0

    def check(self) -> None:
        """Asserts that the leases are consistent with each other and with the counts."""
        assert all(lease.blocks for lease in self._leases), "a lease that keeps no block is listed"
        assert self._leases == sorted(self._leases, key=_EXPIRY), "leases are out of order"
        by_owner: dict[str, list[Lease]] = {}
        for lease in self._leases:
            by_owner.setdefault(lease.owner, []).append(lease)
        assert self._of_owner == by_owner, "the owners' leases differ from all leases"
        counts: Counter[str] = Counter()
        for lease in self._leases:
            counts[lease.owner] += len(lease.blocks)
        assert counts == self._num_by_owner, "the owners' counts differ from their leases"
        assert counts.total() == self.num_blocks, "the count of retained blocks differs from the leases"
        above = [owner for owner, count in counts.items() if count > self._share]
        assert above == ([] if self.dominant is None else [self.dominant]), "another owner is dominant"

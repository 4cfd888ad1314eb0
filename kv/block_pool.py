"""Tracks which blocks are held, and by how many holders, and in which order free blocks are given out. It knows block
numbers and hashes, never tokens or requests.

Every block is in exactly one state. Blocks that are not held are given out in this order:

    blank       no hash       on a stack
    lapsed      has a hash    was retained until its lease ended; the first to lapse goes first
    cached      has a hash    in the LRU
    retained    has a hash    kept in preference to those above, by a lease of ``Retention``
    held        by rows, refcount >= 1; with a hash once its slots hold confirmed KV

Lapsed, cached and retained blocks are found by their hashes until they are given out, and count as free.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, KeysView, Sequence
from itertools import chain
from typing import Any

from penstock.kv.retention import Lease, Retention


class BlockPool:
    """The reference counts, the map from hash to block, and eviction."""

    def __init__(self, num_blocks: int, on_evicted: Callable[[bytes, int], None]) -> None:
        """``on_evicted`` is called with each hash that no longer finds a block, and with its block, which is given
        out."""
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._on_evicted = on_evicted
        self._now = float("-inf")
        self.reset()

    def reset(self) -> None:
        """Empties the pool, because the blocks' content is gone: no block is held, and no hash finds one."""
        self._refcounts = [0] * self.num_blocks
        self._hashes: list[bytes | None] = [None] * self.num_blocks
        self._by_hash: dict[bytes, int] = {}
        # Popped from the end, so that a new pool gives out 0, 1, 2, ...
        self._blanks = list(range(self.num_blocks - 1, -1, -1))
        self._lapsed: OrderedDict[int, None] = OrderedDict()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._retention = Retention(self.num_blocks // 2, self.is_held)

    @property
    def num_free(self) -> int:
        """The number of blocks that can be taken now, cached and retained ones included."""
        return len(self._blanks) + len(self._cached) + len(self._lapsed) + self._retention.num_blocks

    @property
    def num_cached(self) -> int:
        """The number of blocks that are not held and that a hash still finds, retained ones included."""
        return len(self._cached) + len(self._lapsed) + self._retention.num_blocks

    @property
    def num_retained(self) -> int:
        """The number of blocks that are not held and that are evicted only when no other block is free."""
        return self._retention.num_blocks

    def is_held(self, block: int) -> bool:
        return self._refcounts[block] > 0

    def num_unshared(self, block_ids: Iterable[int]) -> int:
        """Returns how many of these blocks have exactly one holder: the number that its release frees."""
        refcounts = self._refcounts
        return [refcounts[block] for block in block_ids].count(1)

    def num_freed(self, tables: Iterable[Iterable[int]]) -> int:
        """Returns how many blocks are free once the holders of all these tables release them."""
        refcounts = self._refcounts
        return sum(refcounts[block] == num for block, num in Counter(chain.from_iterable(tables)).items())

    def find(self, block_hash: bytes) -> int | None:
        """Returns the block with this hash, held or not. Does not modify the pool."""
        return self._by_hash.get(block_hash)

    def take_blocks(self, num_blocks: int) -> list[int]:
        """Gives out blocks with a refcount of 1, in the order above, and drops the hashes of those that had one. The
        caller has checked ``num_free``."""
        assert 0 <= num_blocks <= self.num_free
        blanks = self._blanks
        taken = [blanks.pop() if blanks else self._evict() for _ in range(num_blocks)]
        for block in taken:
            self._refcounts[block] = 1
        return taken

    def _evict(self) -> int:
        if self._lapsed:
            block, _ = self._lapsed.popitem(last=False)
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
        else:
            block = self._retention.pop()
        self._on_evicted(self._drop_hash(block), block)
        return block

    def _drop_hash(self, block: int) -> bytes:
        block_hash = self._hashes[block]
        assert block_hash is not None
        del self._by_hash[block_hash]
        self._hashes[block] = None
        return block_hash

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a holder to each of these blocks, which are held or found by their hashes. A lease stays valid while its
        block is held."""
        refcounts = self._refcounts
        for block in block_ids:
            if not refcounts[block]:
                if self._retention.covers(block):
                    self._retention.hold(block)
                else:
                    self._leave_cache(block)
            refcounts[block] += 1

    def _leave_cache(self, block: int) -> None:
        del (self._cached if block in self._cached else self._lapsed)[block]

    def release(self, block_ids: Sequence[int]) -> None:
        """Removes a holder from each of these blocks, which are a row's blocks in the order of its table. Those with a
        hash enter the cache last block first, so a sequence loses its tail before the blocks that others may share."""
        refcounts = self._refcounts
        for block in reversed(block_ids):
            assert refcounts[block] > 0, f"block {block} is released more often than it was taken"
            refcounts[block] -= 1
            if not refcounts[block]:
                if self._hashes[block] is None:
                    self._blanks.append(block)
                elif self._retention.covers(block):
                    self._retention.drop_hold(block)
                else:
                    self._cached[block] = None
        self._lapse(self._retention.pop_all_excess())

    def publish(self, block: int, block_hash: bytes) -> bool:
        """Lets ``block_hash`` find this held block from now on; returns whether the hash is new. If another block has
        the hash already, that one keeps it: equal hashes mean equal content."""
        assert self._refcounts[block] > 0, f"block {block} is published, but is not held"
        if block_hash in self._by_hash or self._hashes[block] is not None:
            return False
        self._by_hash[block_hash] = block
        self._hashes[block] = block_hash
        return True

    def retain(self, hashes: Sequence[bytes], until: float, owner: str) -> None:
        """Retains the blocks that these hashes of a sequence's beginning find: once they are not held, they are evicted
        after all others until ``until``, by ``time.monotonic()``, or until all that retain a block have ended.

        At most half of all blocks are retained for an ``owner``. Above that, blocks lapse.
        """
        blocks = self._uncached(hashes)
        if blocks:
            self._retention.add_paused(blocks, until, owner)
            self._lapse(self._retention.pop_all_excess())

    def retain_awaited(self, hashes: Sequence[bytes], owner: str, order: Any) -> Lease | None:
        """Retains the blocks that these hashes find, if the first of them is retained, for a sequence that waits. They
        are evicted after those of ``retain``, and those with the highest ``order`` first. The caller ends the lease."""
        if not hashes or not self.is_retained(hashes[0]):
            return None
        lease = self._retention.add_awaited(self._uncached(hashes), owner, order)
        self._lapse(self._retention.pop_all_excess())
        return lease

    def end_awaited(self, lease: Lease) -> None:
        """Ends a lease of ``retain_awaited``."""
        for block in self._retention.end_awaited(lease):
            self._cached[block] = None

    def is_retained(self, block_hash: bytes) -> bool:
        block = self._by_hash.get(block_hash)
        return block is not None and self._retention.covers(block)

    def _uncached(self, hashes: Sequence[bytes]) -> list[int]:
        """Returns the blocks that these hashes of a sequence's beginning find, which leave the ordinary cache."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            if not self._refcounts[block] and not self._retention.covers(block):
                self._leave_cache(block)
            blocks.append(block)
        return blocks

    def give_up(self, hashes: Iterable[bytes], owner: str) -> None:
        """Ends the leases of ``owner`` on the blocks that these hashes find, the last one of a sequence first; those
        that are not held lapse."""
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is not None:
                self._lapse(self._retention.give_up(block, owner))

    def expire(self, now: float) -> None:
        """Lets the blocks lapse that are retained until ``now`` or earlier. Must be called for every plan; costs
        nothing when there are none."""
        self._now = now
        self._lapse(self._retention.pop_expired(now))

    def _lapse(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._lapsed[block] = None

    def flush(self) -> int:
        """Drops every cached block that is not held, retained ones included; returns their number."""
        flushed = [*self._lapsed, *self._cached, *self._retention.clear()]
        for block in flushed:
            self._drop_hash(block)
        self._lapsed.clear()
        self._cached.clear()
        self._blanks += flushed
        return len(flushed)

    @property
    def hashes(self) -> KeysView[bytes]:
        """All hashes that find a block."""
        return self._by_hash.keys()

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Asserts that the pool is consistent with ``holders``, the block tables of all that hold blocks, and with
        itself."""
        expected = [0] * self.num_blocks
        for block_ids in holders:
            assert len(set(block_ids)) == len(block_ids), "a table holds a block twice"
            for block in block_ids:
                expected[block] += 1
        assert expected == self._refcounts, "reference counts differ from the tables"
        self._retention.check()
        blanks, unused = set(self._blanks), self._lapsed.keys() | self._cached.keys()
        retained = {block for block in self._retention.covered if not self._refcounts[block]}
        assert len(blanks) == len(self._blanks), "a blank block is listed twice"
        for block, refcount in enumerate(self._refcounts):
            states = sum(block in state for state in (blanks, self._lapsed, self._cached, retained)) + (refcount > 0)
            assert states == 1, f"block {block} is in {states} states"
            block_hash = self._hashes[block]
            if block_hash is None:
                assert block not in unused, f"cached block {block} has no hash"
                assert not self._retention.covers(block), f"block {block} has a lease, but no hash"
            else:
                assert block not in blanks, f"blank block {block} has a hash"
                assert self._by_hash.get(block_hash) == block, f"block {block} is not found by its hash"
        assert len(self._by_hash) == sum(block_hash is not None for block_hash in self._hashes)

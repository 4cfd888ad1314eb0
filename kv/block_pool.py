"""Tracks which blocks are held, and by how many holders, and in which order free blocks are given out. It knows block
numbers and hashes, never tokens or requests.

Every block is in exactly one state. Blocks that are not held are given out in this order:

    blank       no hash       on a stack
    lapsed      has a hash    was retained until its lease expired; the first to lapse goes first
    cached      has a hash    in the LRU
    retained    has a hash    kept in preference to those above; the nearest expiry goes first. Above half of all
                              blocks, an owner's go before the cached blocks of others
    held        by rows, refcount >= 1; with a hash once its slots hold confirmed KV

Lapsed, cached and retained blocks are found by their hashes until they are given out, and count as free.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, KeysView, Sequence
from itertools import chain

from penstock.kv.retention import Lease, LeaseKind, Retention


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
        self._owners = [""] * self.num_blocks
        self._by_hash: dict[bytes, int] = {}
        # Popped from the end, so that a new pool gives out 0, 1, 2, ...
        self._blanks = list(range(self.num_blocks - 1, -1, -1))
        self._lapsed: OrderedDict[int, None] = OrderedDict()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._retention = Retention(share=self.num_blocks // 2)
        # Leases of retained blocks, and of held ones that will be retained when they are released.
        self._leases: dict[int, Lease] = {}
        self._shorter: dict[int, Lease] = {}
        """Shorter leases of the other kind on such blocks. They apply once the longer one is given up."""
        self._num_leases = 0

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
        elif self._cached and not self._gives_way():
            block, _ = self._cached.popitem(last=False)
        else:
            block = self._retention.pop()
            self._end_leases(block)
        self._on_evicted(self._drop_hash(block), block)
        return block

    def _gives_way(self) -> bool:
        """Returns whether the least recently used block stays, because another owner retains more than its share."""
        dominant = self._retention.dominant
        return dominant is not None and self._owners[next(iter(self._cached))] != dominant

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
                self._leave_cache(block)
            refcounts[block] += 1

    def _leave_cache(self, block: int) -> None:
        if block in self._cached:
            del self._cached[block]
        elif block in self._lapsed:
            del self._lapsed[block]
        else:
            self._retention.remove(block, self._leases[block])

    def release(self, block_ids: Sequence[int]) -> None:
        """Removes a holder from each of these blocks, which are a row's blocks in the order of its table. Those with a
        hash enter the cache last block first, so a sequence loses its tail before the blocks that others may share."""
        refcounts = self._refcounts
        for block in reversed(block_ids):
            assert refcounts[block] > 0, f"block {block} is released more often than it was taken"
            refcounts[block] -= 1
            if not refcounts[block]:
                lease = self._leases.get(block)
                if self._hashes[block] is None:
                    self._blanks.append(block)
                elif lease is not None and lease.until > self._now:
                    self._retention.put(block, lease)
                else:  # even after a lease: it was in use until now, so it counts as recent
                    self._end_leases(block)
                    self._cached[block] = None

    def is_retained(self, block_hash: bytes) -> bool:
        block = self._by_hash.get(block_hash)
        lease = None if block is None else self._leases.get(block)
        return lease is not None and lease.until > self._now

    def publish(self, block: int, block_hash: bytes, owner: str = "") -> bool:
        """Lets ``block_hash`` find this held block of ``owner`` from now on; returns whether the hash is new. If
        another block has it already, that one keeps it: equal hashes mean equal content."""
        assert self._refcounts[block] > 0, f"block {block} is published, but is not held"
        if block_hash in self._by_hash or self._hashes[block] is not None:
            return False
        self._by_hash[block_hash] = block
        self._hashes[block] = block_hash
        self._owners[block] = owner
        return True

    def retain(self, hashes: Sequence[bytes], until: float, owner: str, kind: LeaseKind = LeaseKind.CONTEXT) -> None:
        """Retains the blocks that these hashes of a sequence's beginning find: once they are not held, they are evicted
        after all others until ``until``, by ``time.monotonic()``. If a block has a lease already, the later expiry
        counts.

        Above half of all blocks, those of an ``owner`` go before the cached blocks of others.
        """
        lease = Lease(until, owner, self._num_leases, kind)
        self._num_leases += 1
        leases = self._leases
        for block_hash in reversed(hashes):
            block = self._by_hash.get(block_hash)
            if block is None:
                continue
            known = leases.get(block)
            # On equal times the newer lease gets the block; otherwise a beginning might go before its branch.
            if known is not None and known.until > until:
                self._keep_shorter(block, known, lease)
                continue
            if not self._refcounts[block]:
                self._leave_cache(block)
                self._retention.put(block, lease)
            leases[block] = lease
            if known is not None:
                self._keep_shorter(block, lease, known)

    def give_up(self, hashes: Iterable[bytes], owner: str) -> None:
        """Ends the leases for contexts of ``owner`` on the blocks that these hashes find. A block that is not held
        lapses, unless it was computed ahead and that lease has not expired."""
        found = [block for block_hash in hashes if (block := self._by_hash.get(block_hash)) is not None]
        leased = [block for block in found if (lease := self._leases.get(block)) and lease.owner == owner]
        for block in leased:
            lease = self._leases[block]
            other = self._shorter.pop(block, None)
            if lease.kind is not LeaseKind.CONTEXT:
                continue  # the shorter lease was the context's
            if not self._refcounts[block]:
                self._retention.remove(block, lease)
            if other is not None and other.until > self._now:
                self._leases[block] = other
                if not self._refcounts[block]:
                    self._retention.put(block, other)
                continue
            del self._leases[block]
            if not self._refcounts[block]:
                self._lapsed[block] = None

    def _keep_shorter(self, block: int, longer: Lease, lease: Lease) -> None:
        """Records a lease that does not outlast the block's current one, if it has the other kind."""
        known = self._shorter.get(block)
        if lease.kind is not longer.kind and (known is None or known.kind is longer.kind or known.until <= lease.until):
            self._shorter[block] = lease

    def _end_leases(self, block: int) -> None:
        self._leases.pop(block, None)
        self._shorter.pop(block, None)

    def expire(self, now: float) -> None:
        """Lets the blocks lapse that are retained until ``now`` or earlier. Must be called for every plan; costs
        nothing when there are none."""
        self._now = now
        self._lapse(self._retention.pop_expired(now))

    def _lapse(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._end_leases(block)
            self._lapsed[block] = None

    def flush(self) -> int:
        """Drops every cached block that is not held, retained ones included; returns their number."""
        flushed = [*self._lapsed, *self._cached, *(block for block in self._leases if not self._refcounts[block])]
        for block in flushed:
            self._drop_hash(block)
            self._end_leases(block)
        self._lapsed.clear()
        self._cached.clear()
        self._retention.clear()
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
        retained = {block for block, lease in self._leases.items() if block in lease.blocks}
        assert len(blanks) == len(self._blanks), "a blank block is listed twice"
        assert len(retained) == self._retention.num_blocks, "a retained block has another lease, or none"
        for block, refcount in enumerate(self._refcounts):
            states = sum(block in state for state in (blanks, self._lapsed, self._cached, retained)) + (refcount > 0)
            assert states == 1, f"block {block} is in {states} states"
            block_hash = self._hashes[block]
            if block_hash is None:
                assert block not in unused, f"cached block {block} has no hash"
                assert block not in self._leases, f"block {block} has a lease, but no hash"
            else:
                assert block not in blanks, f"blank block {block} has a hash"
                assert self._by_hash.get(block_hash) == block, f"block {block} is not found by its hash"
        for block, lease in self._shorter.items():
            longer = self._leases[block]
            assert longer.until >= lease.until, f"block {block} is kept by the shorter of two leases"
            assert longer.kind is not lease.kind, f"block {block} has two leases of one kind"
        assert len(self._by_hash) == sum(block_hash is not None for block_hash in self._hashes)

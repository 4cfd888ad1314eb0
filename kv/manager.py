"""Blocks for sequences: a cached prefix, new blocks or none, and publication. Knows neither rows nor plans.

A published block's slots hold confirmed KV, and are never written again. ``BlockPool`` counts; this decides.
"""

from collections.abc import Hashable, Sequence
from typing import Protocol

from penstock.kv.block_hash import hash_blocks
from penstock.kv.block_pool import BlockPool
from penstock.kv.events import KvEventLog

MIN_EVENTS_KEPT = 1 << 10
"""However small the pool is; at 80 bytes each."""


class Hashing(Protocol):
    """Where block hashes come from."""

    def first(self, prompt_hashes: Sequence[bytes]) -> list[bytes]:
        """The hashes that a sequence starts with."""
        ...

    def extend(self, hashes: list[bytes], token_ids: Sequence[int], num_blocks: int, salt: bytes) -> None:
        """Adds hashes until there are ``num_blocks``, all of whose tokens are known."""
        ...


class ChainedHashing:
    """The prefix cache is on."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def first(self, prompt_hashes: Sequence[bytes]) -> list[bytes]:
        """A copy, to be extended."""
        return list(prompt_hashes)

    def extend(self, hashes: list[bytes], token_ids: Sequence[int], num_blocks: int, salt: bytes) -> None:
        """Hashes the blocks between."""
        if num_blocks > len(hashes):
            tail = token_ids[len(hashes) * self._block_size : num_blocks * self._block_size]
            hashes += hash_blocks(tail, self._block_size, salt, hashes[-1] if hashes else b"")


class NoHashing:
    """The prefix cache is off: no block has a hash, so nothing is published and nothing is found."""

    def first(self, prompt_hashes: Sequence[bytes]) -> list[bytes]:
        """None."""
        return []

    def extend(self, hashes: list[bytes], token_ids: Sequence[int], num_blocks: int, salt: bytes) -> None:
        """Adds none."""


class KVCacheManager:
    """Allocates blocks of one pool, finds cached prefixes, and knows which prefixes are being computed."""

    def __init__(self, num_blocks: int, block_size: int, hashing: Hashing) -> None:
        self.block_size = block_size
        self.hashing = hashing
        # Who has missed more changes than there are blocks is served better by all there is, and does not fall behind
        # again while it is told that, unless the cache changes faster than it is told.
        self.events = KvEventLog(block_size, max(num_blocks, MIN_EVENTS_KEPT))
        """Of the prefix map."""
        self.pool = BlockPool(num_blocks, self.events.removed)
        # Hash of a block that will be published soon -> who computes it.
        self._pending: dict[bytes, Hashable] = {}

    @property
    def usage(self) -> float:
        """The share of blocks that somebody holds; cache that can be evicted is not use."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    @property
    def num_retained(self) -> int:
        """Blocks that nobody holds and that are evicted only when no other is free."""
        return self.pool.num_retained

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of this many tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """The longest cached prefix of a sequence of ``num_tokens``, in blocks, without taking them.

        At least the last token is left out: somebody needs its logits.
        """
        find = self.pool.find
        block_ids = []
        for block_hash in hashes[: (num_tokens - 1) // self.block_size]:
            block = find(block_hash)
            if block is None:
                break
            block_ids.append(block)
        return block_ids

    def allocate(self, prefix: Sequence[int], num_tokens: int, reserve: int = 0) -> list[int] | None:
        """A block table for ``num_tokens``: the cached ``prefix``, shared, and new blocks after it.

        None, and nothing changed, where that would leave fewer than ``reserve`` free blocks.
        """
        pool = self.pool
        num_new = self.num_blocks_for(num_tokens) - len(prefix)
        num_cached = sum(1 for block in prefix if not pool.is_held(block))
        if num_new + num_cached + reserve > pool.num_free:
            return None
        pool.share(prefix)
        return [*prefix, *pool.take(num_new)]

    def grow(self, block_ids: list[int], num_blocks: int) -> list[int] | None:
        """New blocks at the end of a table until it has ``num_blocks``; None, and nothing changed, if few are free."""
        num_new = num_blocks - len(block_ids)
        if num_new > self.pool.num_free:
            return None
        new = self.pool.take(num_new)
        block_ids += new
        return new

    def share(self, block_ids: Sequence[int]) -> None:
        """One more holder for the full blocks at the beginning of somebody's table; each holder frees them."""
        self.pool.share(block_ids)

    def free(self, block_ids: Sequence[int]) -> None:
        """Gives up a table. Published blocks stay cached until they are evicted, the last ones first."""
        self.pool.release(block_ids)

    def num_unshared(self, block_ids: Sequence[int]) -> int:
        """How many blocks are free when the holder of this table gives it up."""
        return self.pool.num_unshared(block_ids)

    # What can be found ----------------------------------------------------------------------------------------------

    def publish(
        self, block_ids: Sequence[int], hashes: Sequence[bytes], start: int, stop: int, token_ids: Sequence[int]
    ) -> None:
        """Blocks ``start`` to ``stop`` of a table hold KV that every later plan may read: now they can be found.

        ``hashes`` and ``token_ids`` are the whole sequence's, like the table.
        """
        size = self.block_size
        for index in range(start, min(stop, len(hashes))):
            block_hash = hashes[index]
            if self.pool.publish(block_ids[index], block_hash):
                parent = hashes[index - 1] if index else b""
                self.events.stored(block_hash, parent, token_ids[index * size : (index + 1) * size])

    def retain(self, hashes: Sequence[bytes], until: float, owner: str) -> None:
        """The blocks that these hashes of a sequence's beginning find are evicted after ordinary cache until ``until``,
        by ``time.monotonic()``; bounded for each ``owner``. A no-op for what cannot be found."""
        self.pool.retain(hashes, until, owner)

    def expire(self, now: float) -> None:
        """Ends the retention of what is retained until ``now`` or less. To be called with every plan; takes no time
        when there is nothing to do."""
        self.pool.expire(now)

    def flush(self) -> int:
        """Forgets every cached block that nobody holds, retained ones included; returns how many."""
        num_flushed = self.pool.flush()
        self.events.cleared(but=self.pool.hashes)
        return num_flushed

    def reset(self) -> None:
        """The blocks' content is gone with the worker: nobody holds, finds or computes any."""
        self.pool.reset()
        self._pending.clear()
        self.events.cleared()

    # Prefixes that are being computed -------------------------------------------------------------------------------

    def announce(self, leader: Hashable, hashes: Sequence[bytes]) -> None:
        """``leader`` will compute these blocks in the coming plans."""
        for block_hash in hashes:
            self._pending.setdefault(block_hash, leader)

    def retract(self, leader: Hashable, hashes: Sequence[bytes]) -> None:
        """``leader`` has computed these blocks, or never will."""
        pending = self._pending
        for block_hash in hashes:
            if pending.get(block_hash) is leader:
                del pending[block_hash]

    def leader(self, block_hash: bytes) -> Hashable | None:
        """Who is computing the block with this hash."""
        return self._pending.get(block_hash)

    def is_pending(self, block_hash: bytes | None) -> bool:
        """Whether somebody is computing the block with this hash."""
        return block_hash in self._pending

    def last_pending(self, hashes: Sequence[bytes], num_cached: int, num_tokens: int) -> bytes | None:
        """The last block that a sequence could share with one that is being computed, if its next block is one."""
        last = None
        for block_hash in hashes[num_cached : (num_tokens - 1) // self.block_size]:
            if block_hash not in self._pending:
                break
            last = block_hash
        return last

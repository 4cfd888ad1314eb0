"""Allocates blocks for sequences: a cached prefix, then new blocks. Publishes what was computed. It does not know rows
or plans.

The slots of a published block hold confirmed KV, and are never written again. The block pool counts; this module
decides. Evicted blocks go to the host tier and can still be found there; the next plan makes the copies.

A model with recurrent layers also needs the state at the end of a cached prefix. The state pool has the saved ones, and
drops each of them when neither tier has its block any more.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import takewhile

from penstock.kv.block_groups import BlockGroups
from penstock.kv.block_hash import hash_blocks
from penstock.kv.block_pool import BlockPool
from penstock.kv.events import IN_HOST_MEMORY, NO_ORIGIN, ON_DEVICE, BlockOrigin, KvEventLog
from penstock.kv.host_tier import HostTier
from penstock.kv.retention import LeaseKind
from penstock.kv.state_pool import StatePool
from penstock.kv.wanted import WantedBlocks, Whereabouts
from penstock.kv.window_blocks import WindowBlocks, WindowTable, is_window_key

MIN_EVENTS_KEPT = 1 << 10
"""The minimum number of events kept, for small pools; each takes 80 bytes."""


class KVCacheManager:
    """Allocates the blocks of one pool, finds cached prefixes, and tracks which prefixes are being computed."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        num_state_slots: int = 0,
        groups: BlockGroups | None = None,
        *,
        caches_prefixes: bool = True,
    ) -> None:
        """``groups`` are those of the layers; None: there is one. Without ``caches_prefixes`` no block has a hash, so
        none is published and none is found."""
        self.block_size = block_size
        self.caches_prefixes = caches_prefixes
        # A reader that has missed more changes than there are blocks is better off with the whole content, and does not
        # fall behind again while it reads that, unless the cache changes faster than it reads.
        max_changes = max(num_blocks + num_host_blocks, MIN_EVENTS_KEPT)
        self.events = KvEventLog(block_size, max_changes, self._find_tiers)
        """The blocks that can be found in either tier, and the changes."""
        self.pool = BlockPool(num_blocks, self._on_evicted)
        self.host = HostTier(num_host_blocks, self._on_overwritten)
        self.windows = WindowBlocks(groups or BlockGroups(0, 1, block_size, 1), self.pool, self.host)
        """The blocks of layers with a window, where they are apart from the others."""
        self.states = StatePool(num_state_slots, self._find_tiers, self.pool.is_retained)
        """The states of recurrent layers."""
        self.wanted = WantedBlocks(self._locate)
        """The blocks that waiting sequences need."""
        self.num_restored_tokens = 0
        """Positions whose KV was copied back from the host tier, since the start."""
        # For the next plan. If several blocks are sent to one slot, only the last one is copied.
        self._slot_to_block: dict[int, int] = {}
        self._copies_in: list[tuple[int, int]] = []
        # Hash of a block that will be published soon -> the sequence that computes it.
        self._pending: dict[bytes, Hashable] = {}

    @property
    def usage(self) -> float:
        """The share of blocks that are held. Cached blocks that can be evicted do not count."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def first_hashes(self, prompt_hashes: Sequence[bytes]) -> list[bytes]:
        """Returns the hashes that a sequence starts with, in a list that can be extended."""
        return list(prompt_hashes) if self.caches_prefixes else []

    def extend_hashes(self, hashes: list[bytes], token_ids: Sequence[int], num_blocks: int, salt: bytes) -> None:
        """Adds hashes until there are ``num_blocks``. All tokens of these blocks are known."""
        if self.caches_prefixes and num_blocks > len(hashes):
            tail = token_ids[len(hashes) * self.block_size : num_blocks * self.block_size]
            hashes += hash_blocks(tail, self.block_size, salt, hashes[-1] if hashes else b"")

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that hold the KV of this many tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """Returns the blocks of the longest cached prefix of a sequence of ``num_tokens``, without taking them.

        At least the last token is left out, because its logits are needed.
        """
        find = self.pool.find
        block_ids = []
        for block_hash in hashes[: (num_tokens - 1) // self.block_size]:
            block = find(block_hash)
            if block is None:
                break
            block_ids.append(block)
        return block_ids

    def num_usable(self, hashes: Sequence[bytes], num_found: int) -> int:
        """Returns the number of blocks after which a row may begin, if the first ``num_found`` of a sequence have KV.
        With recurrent layers, these are the blocks before a saved state; with windows, the windowed groups have what a
        row sees from there."""
        num_usable = self.windows.num_usable(hashes, num_found)
        if self.states.num_slots:
            num_usable = min(num_usable, len(hashes))
            while num_usable and self.states.find(hashes[num_usable - 1]) is None:
                num_usable = self.windows.num_usable(hashes, num_usable - 1)
        return num_usable

    def find_stateless(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Returns the hashes of the blocks of a sequence that have KV and must still be computed again: those after the
        last state that is saved, or that a running row will save."""
        states = self.states
        if not states.num_slots:
            return ()
        num_found = len(list(takewhile(self._find_tiers, hashes)))
        if num_found < len(hashes) and hashes[num_found] in self._pending:
            return ()  # the row that computes the next block will save its state where the sequence parts from it
        num_usable = num_found
        while num_usable and states.find(hashes[num_usable - 1]) is states.leader(hashes[num_usable - 1]) is None:
            num_usable -= 1
        return hashes[num_usable:num_found]

    def find_evicted(self, hashes: Sequence[bytes], num_found: int, num_tokens: int) -> Sequence[bytes]:
        """Returns the hashes of the blocks that follow a prefix of ``num_found`` blocks, up to the first that the host
        tier lacks."""
        candidates = hashes[num_found : (num_tokens - 1) // self.block_size]
        return list(takewhile(self.host.__contains__, candidates))

    def allocate(
        self,
        prefix: Sequence[int],
        num_tokens: int,
        reserve: int = 0,
        restored: Sequence[bytes] = (),
        owner: str = "",
        window: WindowTable | None = None,
    ) -> list[int] | None:
        """Returns a block table for ``num_tokens``: the cached ``prefix``, shared, then new blocks. ``window`` has what
        the windowed groups need of the prefix, which is shared too. The next plan copies the ``restored`` blocks of
        ``owner``, which ``find_evicted`` found, to the first new blocks, and those that ``window`` lacks to others;
        these can be found from now on.

        Returns None, and changes nothing, if fewer than ``reserve`` blocks would stay free.
        """
        pool = self.pool
        windowed = WindowTable() if window is None else window
        evicted = [*restored, *windowed.evicted.values()]
        num_new = self.num_blocks_for(num_tokens) - len(prefix)
        shared = [*prefix, *(block for block in windowed.block_ids if block >= 0)]
        num_cached = sum(1 for block in shared if not pool.is_held(block))
        if num_new + len(windowed.evicted) + num_cached + reserve > pool.num_free:
            return None
        pool.share(shared)
        # Before anything else: blocks that are evicted for the new ones must not take these slots.
        slots = [self.host.restore(block_hash) for block_hash in evicted]
        new = pool.take_blocks(num_new)
        of_window = pool.take_blocks(len(windowed.evicted))
        for block_hash, slot, block in zip(evicted, slots, [*new[: len(restored)], *of_window], strict=True):
            self._copies_in.append((slot, block))
            pool.publish(block, block_hash, owner)
            if not is_window_key(block_hash):
                self.events.moved(block_hash)
        for index, block in zip(windowed.evicted, of_window, strict=True):
            windowed.block_ids[index] = block
        windowed.evicted.clear()
        self.wanted.refresh(restored)
        self.num_restored_tokens += len(restored) * self.block_size
        return [*prefix, *new]

    def grow(self, block_ids: list[int], num_blocks: int, window: WindowTable | None = None) -> list[int] | None:
        """Appends new blocks to a table until it has ``num_blocks``; returns them. Does the same for the windowed
        groups. Returns None, and changes nothing, if too few are free."""
        num_new = num_blocks - len(block_ids)
        num_of_window = 0 if window is None else self.windows.num_missing(window, num_blocks)
        if num_new + num_of_window > self.pool.num_free:
            return None
        new = self.pool.take_blocks(num_new)
        block_ids += new
        if window is not None:
            window.block_ids += self.pool.take_blocks(num_of_window)
        return new

    def release(self, block_ids: Sequence[int], window: WindowTable) -> None:
        """Releases the blocks of a row, or of a sequence that kept them while it waited."""
        self.pool.release(window.block_ids)
        self.pool.release(block_ids)

    def retain(self, hashes: Sequence[bytes], until: float, owner: str, kind: LeaseKind = LeaseKind.CONTEXT) -> None:
        """Retains the blocks with which a sequence with these hashes can be continued; see ``BlockPool.retain``."""
        self.pool.retain([*hashes, *self.windows.keys_at_end(hashes)], until, owner, kind)

    def give_up(self, hashes: Sequence[bytes], owner: str) -> None:
        """Ends the leases of ``retain``, for contexts of ``owner``. The blocks at the end lapse first."""
        self.pool.give_up(reversed([*hashes, *self.windows.keys_at_end(hashes)]), owner)

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Returns the copies of the next plan, which is now complete: evicted blocks to slots of the host tier, then
        slots to blocks. In each list, no block and no slot occurs twice."""
        self.host.settle()
        copies_out = [(block, slot) for slot, block in self._slot_to_block.items()]
        copies_in = self._copies_in
        self._slot_to_block, self._copies_in = {}, []
        return copies_out, copies_in

    def _on_evicted(self, block_hash: bytes, block: int) -> None:
        slot = self.host.store(block_hash)
        if slot is not None:
            self._slot_to_block[slot] = block
        if is_window_key(block_hash):
            return  # events, states and waiting sequences follow the blocks of group 0
        if block_hash in self.host:
            self.events.moved(block_hash)
        else:
            self.events.removed(block_hash)
            self.states.drop(block_hash)
        self.wanted.refresh((block_hash,))

    def _on_overwritten(self, block_hash: bytes) -> None:
        if is_window_key(block_hash):
            return
        if self.pool.find(block_hash) is None:
            self.events.removed(block_hash)
            self.states.drop(block_hash)
            self.wanted.refresh((block_hash,))
        else:
            self.events.moved(block_hash)

    def _find_tiers(self, block_hash: bytes) -> int:
        on_device = ON_DEVICE if self.pool.find(block_hash) is not None else 0
        return on_device | (IN_HOST_MEMORY if block_hash in self.host else 0)

    def _locate(self, hashes: Iterable[bytes]) -> dict[bytes, Whereabouts]:
        """Returns where these blocks are, except for those that are on the device or will be."""
        found, pending, host = self.pool.hashes, self._pending, self.host
        away = [block_hash for block_hash in hashes if block_hash not in found and block_hash not in pending]
        whereabouts = dict.fromkeys(away, Whereabouts.MISSING)
        if len(host):
            whereabouts.update((block_hash, Whereabouts.EVICTED) for block_hash in away if block_hash in host)
        return whereabouts

    def publish(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[bytes],
        start: int,
        stop: int,
        token_ids: Sequence[int],
        origin: BlockOrigin = NO_ORIGIN,
        window: WindowTable | None = None,
    ) -> None:
        """Lets blocks ``start`` to ``stop`` of a table be found, and those that ``window`` has of the windowed groups:
        every later plan may read their KV.

        ``hashes`` and ``token_ids`` are those of the whole sequence, like the table. ``origin`` is the request that
        computed them.
        """
        size = self.block_size
        for index in range(start, min(stop, len(hashes))):
            block_hash = hashes[index]
            if not self.pool.publish(block_ids[index], block_hash, origin.tenant):
                continue
            if block_hash in self.host:
                self.events.moved(block_hash)
            else:
                parent = hashes[index - 1] if index else b""
                self.events.stored(block_hash, parent, token_ids[index * size : (index + 1) * size], origin)
        if window is not None:
            self.windows.publish(window, hashes, start, stop, origin.tenant)
        self.wanted.refresh(hashes[start:stop])

    def flush(self) -> int:
        """Drops every cached block that is not held, with the states saved after it; retained blocks and those of the
        host tier too. Returns their number."""
        num_flushed = self.pool.flush() + self.host.clear()
        left = dict.fromkeys(block_hash for block_hash in self.pool.hashes if not is_window_key(block_hash))
        self.events.cleared(but=left)
        self.states.drop_all(but=left)
        self.wanted.refresh_all()
        return num_flushed

    def reset(self) -> None:
        """Empties both tiers and the state pool, because their content is gone with the worker: no block is held, found
        or being computed."""
        self.pool.reset()
        self.host.clear()
        self._slot_to_block.clear()
        self._copies_in.clear()
        self._pending.clear()
        self.events.cleared()
        self.states.reset()
        self.wanted.refresh_all()

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Asserts that both tiers and the events are consistent, and the pool with ``holders``, the block tables of all
        that hold blocks."""
        self.pool.check(holders)
        self.host.check()
        found = {key for key in (*self.pool.hashes, *self.host.hashes) if not is_window_key(key)}
        self.states.check(found)
        assert set(self.events.hashes) == found, "events differ from what can be found"

    def announce(self, leader: Hashable, hashes: Sequence[bytes]) -> None:
        """Records that ``leader`` will compute these blocks in the coming plans."""
        for block_hash in hashes:
            self._pending.setdefault(block_hash, leader)
        self.wanted.refresh(hashes)

    def retract(self, leader: Hashable, hashes: Sequence[bytes]) -> None:
        """Records that ``leader`` has computed these blocks, or never will."""
        pending = self._pending
        for block_hash in hashes:
            if pending.get(block_hash) is leader:
                del pending[block_hash]
        self.wanted.refresh(hashes)

    def leader(self, block_hash: bytes) -> Hashable | None:
        """Returns the sequence that is computing the block with this hash, or will save its state there."""
        return self._pending.get(block_hash, self.states.leader(block_hash))

    def num_coming(
        self, hashes: Sequence[bytes], num_found: int, num_tokens: int, is_ahead: Callable[[Hashable], bool]
    ) -> int:
        """Returns how many blocks after a found prefix of ``num_found`` will be computed by running or waiting
        sequences for which ``is_ahead`` is true."""
        num_coming = 0
        for block_hash in hashes[num_found : (num_tokens - 1) // self.block_size]:
            leader = self._pending.get(block_hash, self.wanted.owner(block_hash))
            if leader is None or not is_ahead(leader):
                break
            num_coming += 1
        return num_coming

    def last_pending(self, hashes: Sequence[bytes], num_cached: int, num_tokens: int) -> bytes | None:
        """Returns the last block that a sequence can share with one that is being computed, if its next block is one of
        these."""
        candidates = hashes[num_cached : (num_tokens - 1) // self.block_size]
        pending = list(takewhile(self._pending.__contains__, candidates))
        return pending[-1] if pending else None

"""Tracks which blocks the waiting sequences need, and which of these are not in the cache. It knows hashes, never
plans.

Each block is counted once, however many sequences need it: the first of them computes it, and the others find it. The
counts follow the cache, so the prefixes of a whole queue need not be looked up again.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import IntEnum
from heapq import nlargest

MAX_PARTINGS = 4
"""The maximum number of places in a part of a sequence at which waiting ones part from it."""


class Whereabouts(IntEnum):
    """The place of a block's KV."""

    AT_HAND = 0
    """On the device, or a running sequence computes it."""
    EVICTED = 1
    """Only in the host tier."""
    MISSING = 2
    """Nowhere: it must be computed."""


class WantedBlocks:
    """The blocks that waiting sequences need. A sequence is charged for those of its blocks that are not at hand and
    that no sequence before it needs."""

    def __init__(self, locate: Callable[[Iterable[bytes]], dict[bytes, Whereabouts]]) -> None:
        """``locate`` returns the places of those blocks that are not at hand. ``refresh`` must be called for blocks
        that may have moved."""
        self.on_charged: Callable[[Hashable, int, int], None] = lambda owner, num_missing, num_evicted: None
        """Called with the sequence, and with the changes to its numbers of missing and evicted blocks."""
        self.num_missing = 0
        """The number of missing blocks for which no sequence is charged, because the one that was has left the
        queue."""
        self._locate = locate
        # Hashes are chained: a sequence that needs a block needs all before it, so counts never rise along a sequence.
        self._counts: dict[bytes, int] = {}
        self._owners: dict[bytes, Hashable] = {}
        # Contains only blocks that are not at hand.
        self._whereabouts: dict[bytes, Whereabouts] = {}

    def add_owner(self, owner: Hashable, hashes: Sequence[bytes], goes_before: Callable[[Hashable], bool]) -> int:
        """Adds a waiting sequence that needs these blocks, its first ones; returns how many of them another sequence
        needs already. It is charged for blocks of sequences that it ``goes_before``."""
        counts, num_shared = self._counts, 0
        for block_hash in hashes:
            if block_hash not in counts:
                break
            counts[block_hash] += 1
            num_shared += 1
            charged = self._owners.get(block_hash)
            if charged is None or goes_before(charged):
                where = self._whereabouts.get(block_hash, Whereabouts.AT_HAND)
                self._charge(block_hash, where, -1)
                self._owners[block_hash] = owner
                self._charge(block_hash, where, 1)
        new = hashes[num_shared:]
        counts.update(dict.fromkeys(new, 1))
        self._owners.update(dict.fromkeys(new, owner))
        away = self._locate(new)
        if away:
            self._whereabouts.update(away)
            num_missing = list(away.values()).count(Whereabouts.MISSING)
            self.on_charged(owner, num_missing, len(away) - num_missing)
        return num_shared

    def remove(self, owner: Hashable, hashes: Sequence[bytes]) -> None:
        """Removes a sequence that was added with these blocks: it no longer waits, and is charged for nothing."""
        counts, owners, whereabouts = self._counts, self._owners, self._whereabouts
        for block_hash in hashes:
            is_missing = whereabouts.get(block_hash) is Whereabouts.MISSING
            if counts[block_hash] == 1:
                del counts[block_hash]
                if owners.pop(block_hash, None) is None and is_missing:
                    self.num_missing -= 1
                whereabouts.pop(block_hash, None)
            else:
                counts[block_hash] -= 1
                if owners.get(block_hash) is owner:
                    del owners[block_hash]
                    self.num_missing += is_missing

    def refresh(self, hashes: Sequence[bytes]) -> None:
        """Updates the places of these blocks, which may have moved."""
        if self._counts.keys().isdisjoint(hashes):
            return
        wanted = [block_hash for block_hash in hashes if block_hash in self._counts]
        away = self._locate(wanted)
        for block_hash in wanted:
            before = self._whereabouts.get(block_hash, Whereabouts.AT_HAND)
            now = away.get(block_hash, Whereabouts.AT_HAND)
            if now is before:
                continue
            self._charge(block_hash, before, -1)
            self._charge(block_hash, now, 1)
            if now:
                self._whereabouts[block_hash] = now
            else:
                del self._whereabouts[block_hash]

    def refresh_all(self) -> None:
        """Updates the places of all blocks, because many may have moved. ``on_charged`` is called once per sequence."""
        before, self._whereabouts = self._whereabouts, self._locate(self._counts)
        self.num_missing = 0
        changes: dict[Hashable, list[int]] = {}
        for block_hash in self._counts:
            was = before.get(block_hash, Whereabouts.AT_HAND)
            now = self._whereabouts.get(block_hash, Whereabouts.AT_HAND)
            owner = self._owners.get(block_hash)
            if owner is None:
                self.num_missing += now is Whereabouts.MISSING
            elif was is not now:
                change = changes.setdefault(owner, [0, 0])
                change[0] += (now is Whereabouts.MISSING) - (was is Whereabouts.MISSING)
                change[1] += (now is Whereabouts.EVICTED) - (was is Whereabouts.EVICTED)
        for owner, (num_missing, num_evicted) in changes.items():
            self.on_charged(owner, num_missing, num_evicted)

    def owner(self, block_hash: bytes) -> Hashable | None:
        """Returns the sequence that is charged for a missing block."""
        return self.first(block_hash) if self._whereabouts.get(block_hash) is Whereabouts.MISSING else None

    def first(self, block_hash: bytes) -> Hashable | None:
        """Returns the sequence that is charged for a block while it is not at hand."""
        return self._owners.get(block_hash)

    def partings(self, hashes: Sequence[bytes], start: int, stop: int) -> list[int]:
        """Returns the numbers of blocks, above ``start`` and up to ``stop``, after which waiting sequences part from a
        sequence with these hashes: at most ``MAX_PARTINGS``, those with the most sequences."""
        counts = [self._counts.get(block_hash, 0) for block_hash in hashes[start : stop + 1]]
        counts += [0] * (stop + 1 - start - len(counts))
        parted = [(counts[index] - counts[index + 1], start + index + 1) for index in range(stop - start)]
        return [number for num_sequences, number in nlargest(MAX_PARTINGS, parted) if num_sequences]

    def _charge(self, block_hash: bytes, where: Whereabouts, sign: int) -> None:
        if where is Whereabouts.AT_HAND:
            return
        owner = self._owners.get(block_hash)
        if owner is not None:
            is_missing = where is Whereabouts.MISSING
            self.on_charged(owner, sign * is_missing, sign * (not is_missing))
        elif where is Whereabouts.MISSING:
            self.num_missing += sign

    def check(self, waiting: Sequence[tuple[Hashable, Sequence[bytes], int, int]]) -> None:
        """Asserts that the counts match the waiting sequences: for each, its blocks, and the numbers of missing and
        evicted blocks that it is charged for."""
        counts: dict[bytes, int] = {}
        for _, hashes, _, _ in waiting:
            for block_hash in hashes:
                counts[block_hash] = counts.get(block_hash, 0) + 1
        assert counts == self._counts, "blocks are counted that no waiting sequence needs"
        assert self._whereabouts == self._locate(counts), "a block has moved, and its sequences were not updated"
        for owner, hashes, num_missing, num_evicted in waiting:
            charged = [self._whereabouts.get(h) for h in hashes if self._owners.get(h) is owner]
            assert charged.count(Whereabouts.MISSING) == num_missing, "the count of missing blocks is wrong"
            assert charged.count(Whereabouts.EVICTED) == num_evicted, "the count of evicted blocks is wrong"
        unowned = [h for h in counts if h not in self._owners and self._whereabouts.get(h) is Whereabouts.MISSING]
        assert len(unowned) == self.num_missing, "the count of blocks without a sequence is wrong"

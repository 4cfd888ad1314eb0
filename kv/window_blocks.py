"""The blocks of layers with a window: which of them a sequence needs, and which a cached prefix needs. It does not know
rows or plans.

A sequence has a table for each group of layers (see ``block_groups``), and gives up a windowed group's blocks that none
of its later queries can see. Such a block is found by its tokens' hash and the number of the group. It may be evicted
before the block of group 0 with the same tokens, or after it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.kv.block_groups import BlockGroups
from penstock.kv.block_hash import HASH_BYTES
from penstock.kv.block_pool import BlockPool
from penstock.kv.host_tier import HostTier


@dataclass(slots=True)
class WindowTable:
    """The blocks that a sequence has in the windowed groups."""

    start: int = 0
    """The number of blocks of tokens before them."""
    block_ids: list[int] = field(default_factory=list)
    """A block of each windowed group for a block of tokens, then for the next one, and so on."""
    evicted: dict[int, bytes] = field(default_factory=dict)
    """Keys of blocks that are only in the host tier, by their indices in ``block_ids``, until they have blocks."""


def is_window_key(key: bytes) -> bool:
    """Whether a key of the pool or the host tier is that of a windowed group's block."""
    return len(key) > HASH_BYTES


class WindowBlocks:
    """Finds, publishes and releases the blocks of windowed groups. Without such groups it does nothing."""

    def __init__(self, groups: BlockGroups, pool: BlockPool, host: HostTier) -> None:
        self.groups = groups
        self._pool = pool
        self._host = host
        self._suffixes = [bytes((group,)) for group in range(1, groups.num_windowed + 1)]

    def end(self, table: WindowTable) -> int:
        """Returns the number of blocks of tokens up to the end of a table."""
        return table.start + len(table.block_ids) // max(1, self.groups.num_windowed)

    def first_needed(self, position: int) -> int:
        """Returns the first block that a query may see at ``position``, at later ones, or at earlier ones of the same
        block."""
        return max(0, position // self.groups.block_size - self.groups.num_before)

    def num_usable(self, hashes: Sequence[bytes], num_found: int) -> int:
        """Returns the largest number of blocks, up to ``num_found``, after which a row may begin: the blocks that it
        can see from there are found."""
        if not self._suffixes:
            return num_found
        num_before, num_usable = self.groups.num_before, min(num_found, len(hashes))
        for index in range(num_usable - 1, -1, -1):
            if num_usable - index > num_before:
                break
            if not all(self._is_found(hashes[index] + suffix) for suffix in self._suffixes):
                num_usable = index
        return num_usable

    def _is_found(self, key: bytes) -> bool:
        return self._pool.find(key) is not None or key in self._host

    def find(self, hashes: Sequence[bytes], num_blocks: int) -> WindowTable:
        """Returns the table of a row that begins after a usable number of blocks, without taking its blocks."""
        table = WindowTable(max(0, num_blocks - self.groups.num_before))
        if not self._suffixes:
            return table
        for key in self._keys(hashes[table.start : num_blocks]):
            block = self._pool.find(key)
            if block is None:
                table.evicted[len(table.block_ids)] = key
            table.block_ids.append(-1 if block is None else block)
        return table

    def part(self, table: WindowTable, num_blocks: int) -> WindowTable | None:
        """Returns the part of a table that another row needs which begins after ``num_blocks`` blocks; None if it has
        been given up, or is not computed yet."""
        part = WindowTable(max(0, num_blocks - self.groups.num_before))
        if self._suffixes:
            if part.start < table.start or self.end(table) < num_blocks:
                return None
            first = (part.start - table.start) * len(self._suffixes)
            part.block_ids = table.block_ids[first : first + (num_blocks - part.start) * len(self._suffixes)]
        return part

    def num_ahead(self, num_cached: int, num_tokens: int) -> int:
        """Returns the number of new blocks that a row needs at most until its history of ``num_tokens`` is computed, if
        it begins after ``num_cached`` blocks."""
        groups = self.groups
        end = min(-(-num_tokens // groups.block_size), max(0, num_cached - groups.num_before) + groups.most_held)
        return groups.num_windowed * (end - num_cached)

    def num_missing(self, table: WindowTable, num_blocks: int) -> int:
        """Returns the number of new blocks with which a table has those of ``num_blocks`` blocks of tokens."""
        return len(self._suffixes) * max(0, num_blocks - self.end(table))

    def hold_chunk(self, table: WindowTable, end: int) -> tuple[list[int], int]:
        """Appends new blocks to a row's table, as many as are free, for a chunk up to position ``end``. Returns them,
        and how far the chunk can go."""
        if not self._suffixes:
            return [], end
        num_new = min(self.num_missing(table, -(-end // self.groups.block_size)), self._pool.num_free)
        new = self._pool.take_blocks(num_new - num_new % len(self._suffixes))
        table.block_ids += new
        return new, min(end, self.end(table) * self.groups.block_size)

    def pass_blocks(self, table: WindowTable, position: int) -> None:
        """Releases the blocks that no query can see any more at ``position`` or later: the next plan may give them
        out."""
        num_passed = self.first_needed(position) - table.start
        if num_passed > 0 and self._suffixes:
            end = num_passed * len(self._suffixes)
            self._pool.release(table.block_ids[:end])
            del table.block_ids[:end]
            table.start += num_passed

    def publish(self, table: WindowTable, hashes: Sequence[bytes], start: int, stop: int, owner: str) -> None:
        """Lets blocks ``start`` to ``stop`` be found, as many as the table has. ``hashes`` are the sequence's."""
        first, last = max(start, table.start), min(stop, self.end(table), len(hashes))
        if not self._suffixes or first >= last:
            return
        block_ids = table.block_ids[(first - table.start) * len(self._suffixes) :]
        for key, block in zip(self._keys(hashes[first:last]), block_ids, strict=False):
            self._pool.publish(block, key, owner)

    def keys_at_end(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Returns the keys of the blocks that a continuation of a sequence with these hashes needs."""
        return list(self._keys(hashes[max(0, len(hashes) - self.groups.num_before) :]))

    def _keys(self, hashes: Sequence[bytes]) -> Iterator[bytes]:
        return (block_hash + suffix for block_hash in hashes for suffix in self._suffixes)

"""Who holds which block, and which blocks nobody holds. Knows numbers and hashes, never tokens or requests.

Every block is in exactly one state:

    blank    refcount 0, no hash        on the stack of blanks; given out first
    cached   refcount 0, has a hash     in the LRU; found by its hash, or evicted when no blank is left
    held     refcount >= 1              by rows; with a hash once its slots hold confirmed KV
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference counts, the map from hash to block, and eviction, least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._refcounts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # Popped from the end, so that a new pool gives out 0, 1, 2, ...
        self._blanks = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return len(self._blanks) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds but that a hash still finds."""
        return len(self._cached)

    def is_held(self, block: int) -> bool:
        """Whether somebody holds it."""
        return self._refcounts[block] > 0

    def find(self, block_hash: bytes) -> int | None:
        """The block with this hash, held or cached. Does not modify the pool."""
        return self._by_hash.get(block_hash)

    def take(self, num_blocks: int) -> list[int]:
        """Gives out blocks with a refcount of 1: blanks first, then the least recently used cached ones, whose hashes
        are forgotten. The caller has checked ``num_free``."""
        assert 0 <= num_blocks <= self.num_free
        blanks = self._blanks
        taken = []
        for _ in range(num_blocks):
            block = blanks.pop() if blanks else self._evict()
            self._refcounts[block] = 1
            taken.append(block)
        return taken

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hashes[block]
        assert block_hash is not None
        del self._by_hash[block_hash]
        self._hashes[block] = None
        return block

    def share(self, block_ids: Iterable[int]) -> None:
        """One more holder for each of these, which are held or cached."""
        refcounts = self._refcounts
        for block in block_ids:
            if not refcounts[block]:
                del self._cached[block]
            refcounts[block] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One holder fewer for each of these, a row's blocks in the order of its table.

        They enter the LRU last block first: a sequence loses its tail before the blocks that others may share.
        """
        refcounts = self._refcounts
        for block in reversed(block_ids):
            assert refcounts[block] > 0, f"block {block} is released more often than it was taken"
            refcounts[block] -= 1
            if not refcounts[block]:
                if self._hashes[block] is None:
                    self._blanks.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, block_hash: bytes) -> None:
        """From now on ``block_hash`` finds this held block. Where another block has the hash already, that one stays:
        equal hashes mean equal content."""
        assert self._refcounts[block] > 0, f"block {block} is published while nobody holds it"
        if block_hash not in self._by_hash and self._hashes[block] is None:
            self._by_hash[block_hash] = block
            self._hashes[block] = block_hash

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Asserts that the pool agrees with ``holders``, the block tables of all that hold blocks, and with itself."""
        expected = [0] * self.num_blocks
        for block_ids in holders:
            assert len(set(block_ids)) == len(block_ids), "a table holds a block twice"
            for block in block_ids:
                expected[block] += 1
        assert expected == self._refcounts, "reference counts differ from the tables"
        blanks, cached = set(self._blanks), set(self._cached)
        assert len(blanks) == len(self._blanks), "a blank block is listed twice"
        for block, refcount in enumerate(self._refcounts):
            states = (block in blanks) + (block in cached) + (refcount > 0)
            assert states == 1, f"block {block} is in {states} states"
            block_hash = self._hashes[block]
            if block_hash is None:
                assert block not in cached, f"cached block {block} has no hash"
            else:
                assert block not in blanks, f"blank block {block} has a hash"
                assert self._by_hash.get(block_hash) == block, f"block {block} is not found by its hash"
        assert len(self._by_hash) == sum(block_hash is not None for block_hash in self._hashes)

"""A cache under random operations, and a mirror built from what is told of it."""

import random
from collections.abc import Iterable

import pytest

from penstock.kv.block_hash import tenant_salt
from penstock.kv.events import StoredBlock
from penstock.kv.manager import KVCacheManager

BLOCK_SIZE = 4
SALTS = [tenant_salt("model", tenant) for tenant in ("one", "other")]


class Sequence:
    """A row: its tokens, of which a part is computed."""

    def __init__(self, token_ids: list[int], salt: bytes, hashes: list[bytes], block_ids: list[int], num_cached: int):
        self.token_ids = token_ids
        self.salt = salt
        self.hashes = hashes
        self.block_ids = block_ids
        self.num_published = num_cached


class RandomCache:
    """Rows that begin, grow and end as they do in the scheduler, and what happens to the cache besides."""

    def __init__(self, seed: int, num_blocks: int = 40, num_host_blocks: int = 0) -> None:
        self.kv = KVCacheManager(num_blocks, BLOCK_SIZE, num_host_blocks)
        # What lies where, by hash, if all copies are made.
        self._blocks: list[bytes | None] = [None] * num_blocks
        self._slots: list[bytes | None] = [None] * num_host_blocks
        self.num_copied_in = 0
        self.content: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        """Of every block that was ever published: the parent's hash and the tokens."""
        self._rng = random.Random(seed)
        self._rows: list[Sequence] = []
        self._now = 0.0

    def operate(self) -> None:
        """One operation."""
        self._now += self._rng.random()
        operation = self._rng.choices(
            (self._begin, self._publish, self._grow, self._end, self._expire, self._flush, self._reset, self._copy),
            (30, 40, 20, 20, 10, 0.2, 0.1, 20),
        )[0]
        operation()

    def check(self) -> None:
        self.kv.check([row.block_ids for row in self._rows])
        self._copy()
        for block_hash in self.kv.pool.hashes:
            block = self.kv.pool.find(block_hash)
            assert block is not None
            assert self._blocks[block] == block_hash
        assert set(self.kv.host.hashes) <= set(self._slots)

    @property
    def map(self) -> dict[bytes, tuple[bytes, tuple[int, ...]]]:
        """What can be found now."""
        found = dict.fromkeys([*self.kv.pool.hashes, *self.kv.host.hashes])
        return {block_hash: self.content[block_hash] for block_hash in found}

    def _begin(self) -> None:
        rng, kv = self._rng, self.kv
        salt = rng.choice(SALTS)
        shared, length = rng.randint(0, 24), rng.randint(1, 28)
        family = rng.randrange(3)
        token_ids = [family + position if position < shared else rng.randrange(100) for position in range(length)]
        hashes: list[bytes] = []
        kv.extend_hashes(hashes, token_ids, length // BLOCK_SIZE, salt)
        prefix = kv.find_prefix(hashes, length)
        restored = kv.find_evicted(hashes, len(prefix), length) if rng.random() < 0.8 else []
        block_ids = kv.allocate(prefix, length, restored=restored)
        if block_ids is None:
            self._end()
        else:
            self._rows.append(Sequence(token_ids, salt, hashes, block_ids, len(prefix) + len(restored)))

    def _copy(self) -> None:
        """A plan is made, and carried out."""
        copies_out, copies_in = self.kv.take_copies()
        for block, slot in copies_out:
            self._slots[slot] = self._blocks[block]
        for slot, block in copies_in:
            self._blocks[block] = self._slots[slot]
            self.num_copied_in += 1

    def _publish(self) -> None:
        self._copy()
        if self._rows:
            row = self._rng.choice(self._rows)
            stop = self._rng.randint(row.num_published, len(row.token_ids) // BLOCK_SIZE)
            self.kv.extend_hashes(row.hashes, row.token_ids, stop, row.salt)
            for index in range(row.num_published, stop):
                parent = row.hashes[index - 1] if index else b""
                tokens = row.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
                self.content[row.hashes[index]] = (parent, tuple(tokens))
                self._blocks[row.block_ids[index]] = row.hashes[index]
            self.kv.publish(row.block_ids, row.hashes, row.num_published, stop, row.token_ids)
            row.num_published = stop

    def _grow(self) -> None:
        if self._rows:
            row = self._rng.choice(self._rows)
            tokens = [self._rng.randrange(100) for _ in range(self._rng.randint(1, 6))]
            if self.kv.grow(row.block_ids, self.kv.num_blocks_for(len(row.token_ids) + len(tokens))) is None:
                self._end()
            else:
                row.token_ids += tokens

    def _end(self) -> None:
        if self._rows:
            row = self._rows.pop(self._rng.randrange(len(self._rows)))
            if self._rng.random() < 0.5:
                self.kv.pool.retain(row.hashes, self._now + self._rng.random() * 30, str(SALTS.index(row.salt)))
            self.kv.pool.release(row.block_ids)

    def _expire(self) -> None:
        self.kv.pool.expire(self._now)

    def _flush(self) -> None:
        self._copy()
        num_cached = self.kv.pool.num_cached + len(self.kv.host)
        assert self.kv.flush() == num_cached

    def _reset(self) -> None:
        self._rows.clear()
        self.kv.reset()


class Mirror:
    """What a subscriber knows."""

    def __init__(self) -> None:
        self.map: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        self.sequence = 0
        self.num_cleared = 0

    def apply(
        self,
        sequence: int,
        cleared: bool,
        removed: Iterable[bytes],
        stored: Iterable[StoredBlock] | Iterable[tuple[bytes, bytes, tuple[int, ...]]],
    ) -> None:
        """In the order that the contract says."""
        if cleared:
            self.map.clear()
            self.num_cleared += 1
        for block_hash in removed:
            self.map.pop(block_hash, None)
        for block_hash, parent_hash, token_ids, *_ in stored:
            self.map[block_hash] = (parent_hash, token_ids)
        assert cleared or sequence >= self.sequence, "numbers go backwards"
        self.sequence = sequence


@pytest.fixture(scope="session")
def random_cache_type() -> type[RandomCache]:
    return RandomCache


@pytest.fixture(scope="session")
def mirror_type() -> type[Mirror]:
    return Mirror

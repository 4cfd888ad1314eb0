"""Batches follow both tiers of the cache, whatever happens in it."""

import random

import pytest

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.kv.events import BlockOrigin, KvEventReader
from penstock.kv.manager import KVCacheManager
from penstock.service.kv_publisher.batches import BatchEncoder

SIZE = 4


class Cache:
    """A cache, and a router that reads its batches."""

    def __init__(self, index, num_blocks, num_host_blocks):
        self.kv = KVCacheManager(num_blocks, SIZE, num_host_blocks)
        self.kv.events.keeps_details = True
        self.index = index
        self._reader, self._encoder = KvEventReader(self.kv.events), BatchEncoder(self.kv.events)

    def compute(self, token_ids, origin):
        hashes = hash_blocks(token_ids, SIZE, tenant_salt("m", origin.tenant))
        prefix = self.kv.find_prefix(hashes, len(token_ids) + 1)
        restored = self.kv.find_evicted(hashes, len(prefix), len(token_ids) + 1)
        table = self.kv.allocate(prefix, len(token_ids), 0, restored)
        assert table is not None
        self.kv.publish(table, hashes, len(prefix) + len(restored), len(hashes), token_ids, origin)
        self.kv.take_copies()
        self.kv.pool.release(table)

    def report(self, max_bytes=1 << 20):
        while (payload := self._encoder.encode_batch(self._reader.read(max_bytes), 0.0)) is not None:
            self.index.apply(payload)


@pytest.fixture
def new_cache(new_index):
    return lambda num_blocks, num_host_blocks=0: Cache(new_index(), num_blocks, num_host_blocks)


def test_an_evicted_block_moves_to_host_memory_and_back(new_cache):
    cache = new_cache(2, 2)
    first, second = [1] * 8, [2] * 8
    cache.compute(first, BlockOrigin("acme", "talk"))
    cache.report()
    assert len(cache.index.blocks["GPU"]) == 2
    cache.compute(second, BlockOrigin())
    cache.report()
    on_device, in_host_memory = cache.index.blocks["GPU"], cache.index.blocks["CPU"]
    assert on_device.keys().isdisjoint(in_host_memory)
    assert {key[2] for key in in_host_memory.values()} == {("acme",), None}
    assert cache.index.sessions == {"talk", None}
    cache.compute(first, BlockOrigin())
    cache.report()
    assert in_host_memory.keys() - on_device.keys(), "the second prompt's blocks are in host memory only"


@pytest.mark.parametrize("seed", range(3))
def test_the_index_is_the_cache_after_any_changes(new_cache, numbers_of, seed):
    rng = random.Random(seed)
    cache = new_cache(12, 6)
    for _ in range(300):
        if rng.random() < 0.02:
            cache.kv.flush()
        elif rng.random() < 0.01:
            cache.kv.reset()
        stem = [rng.randrange(3)] * (SIZE * rng.randrange(1, 4))
        tail = [rng.randrange(5)] * (SIZE * rng.randrange(3))
        cache.compute(stem + tail, BlockOrigin(rng.choice(["default", "acme", "bolt"]), rng.choice(["", "talk"])))
        if rng.random() < 0.5:
            cache.report(rng.choice([1, 100, 1 << 20]))
    cache.report()
    assert cache.index.blocks["GPU"].keys() == numbers_of(cache.kv.pool.hashes)
    assert cache.index.blocks["CPU"].keys() == numbers_of(cache.kv.host.hashes)


def test_the_blocks_of_an_adapter_have_its_name(new_cache):
    """As in vLLM: the name is a key of each block, before the salt of the first one."""
    cache = new_cache(8)
    cache.compute([1] * 8, BlockOrigin("acme", adapter="support"))
    cache.compute([2] * 8, BlockOrigin("default", adapter="support"))
    cache.compute([3] * 8, BlockOrigin("default"))
    names, store = [], cache.index._store

    def note(event):
        names.append((event.lora_name, event.lora_id, event.extra_keys))
        store(event)

    cache.index._store = note
    cache.report()
    assert names == [
        ("support", None, [("support", "acme"), ("support",)]),
        ("support", None, [("support",), ("support",)]),
        (None, None, None),
    ]


def test_consecutive_blocks_are_one_event(new_cache):
    cache = new_cache(8)
    cache.compute(list(range(16)), BlockOrigin("acme"))
    events: list[bytes] = []
    cache.index.apply = events.append
    cache.report()
    assert len(events) == 1
    assert events[0].count(b"BlockStored") == 1
    assert events[0].count(b"acme") == 2, "the salt is named only for the first block, in two places"

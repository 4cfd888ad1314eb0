"""Prefixes found, tables allocated, prefixes that are being computed."""

import pytest

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.kv.manager import ChainedHashing, KVCacheManager, NoHashing

TOKENS = list(range(100, 120))
SALT = tenant_salt("model", "tenant")
HASHES = hash_blocks(TOKENS, 4, SALT)


@pytest.fixture
def kv():
    return KVCacheManager(8, 4, ChainedHashing(4))


def computed(kv, hashes, num_tokens):
    """A table whose full blocks are published."""
    block_ids = kv.allocate([], num_tokens)
    kv.publish(block_ids, hashes, 0, num_tokens // 4)
    return block_ids


def test_the_longest_prefix_is_found_and_the_last_token_is_left_to_compute(kv):
    block_ids = computed(kv, HASHES, 20)
    assert kv.find_prefix(HASHES, 21) == block_ids
    assert kv.find_prefix(HASHES, 20) == block_ids[:4]
    assert kv.find_prefix(HASHES, 17) == block_ids[:4]
    assert kv.find_prefix(HASHES, 16) == block_ids[:3]
    assert kv.find_prefix(HASHES, 1) == []
    other = hash_blocks([*TOKENS[:9], *TOKENS[:11]], 4, SALT)
    assert kv.find_prefix(other, 20) == block_ids[:2]


def test_another_tenant_finds_nothing(kv):
    computed(kv, HASHES, 20)
    assert kv.find_prefix(hash_blocks(TOKENS, 4, tenant_salt("model", "other")), 20) == []
    assert kv.find_prefix(hash_blocks(TOKENS, 4, tenant_salt("other", "tenant")), 20) == []


def test_allocation_shares_the_prefix_and_adds_new_blocks(kv):
    block_ids = computed(kv, HASHES, 12)
    table = kv.allocate(kv.find_prefix(HASHES, 20), 20)
    assert table[:3] == block_ids
    assert not set(table[3:]) & set(block_ids)
    kv.pool.check([block_ids, table])


def test_allocation_that_does_not_fit_changes_nothing(kv):
    kv.free(computed(kv, HASHES, 12))
    prefix = kv.find_prefix(HASHES, 20)
    assert kv.allocate(prefix, 36) is None
    assert kv.allocate(prefix, 32, reserve=1) is None
    kv.pool.check([])
    assert kv.find_prefix(HASHES, 20) == prefix
    # Cached blocks of the prefix are free, but cannot be counted twice.
    assert len(kv.allocate(prefix, 32)) == 8
    assert kv.usage == 1.0


def test_a_table_grows_or_stays(kv):
    table = kv.allocate([], 8)
    assert len(kv.grow(table, 8)) == 6
    assert len(table) == 8
    assert kv.grow(table, 9) is None
    assert len(table) == 8


def test_hashes_are_extended_from_the_prompts(kv):
    hashes = kv.hashing.first(HASHES[:2])
    kv.hashing.extend(hashes, TOKENS, 5, SALT)
    assert hashes == HASHES
    kv.hashing.extend(hashes, TOKENS, 3, SALT)
    assert hashes == HASHES


def test_off_is_an_empty_map():
    kv = KVCacheManager(8, 4, NoHashing())
    hashes = kv.hashing.first(HASHES)
    kv.hashing.extend(hashes, TOKENS, 5, SALT)
    assert hashes == []
    computed(kv, hashes, 20)
    assert kv.find_prefix(hashes, 20) == []
    assert kv.last_pending(hashes, 0, 20) is None


def test_a_prefix_being_computed_is_awaited_until_it_is_retracted(kv):
    leader, late = object(), object()
    kv.announce(leader, HASHES[:4])
    kv.announce(late, HASHES)
    assert kv.last_pending(HASHES, 0, 21) == HASHES[4]
    assert kv.last_pending(HASHES, 0, 12) == HASHES[1]
    assert kv.last_pending(HASHES, 0, 4) is None
    kv.retract(late, HASHES)
    assert kv.last_pending(HASHES, 2, 21) == HASHES[3]
    assert not kv.is_pending(HASHES[4])
    kv.retract(leader, HASHES)
    assert kv.last_pending(HASHES, 0, 21) is None

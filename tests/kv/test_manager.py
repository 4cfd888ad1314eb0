"""Prefixes found, tables allocated, prefixes that are being computed."""

import pytest

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.kv.manager import KVCacheManager

TOKENS = list(range(100, 120))
SALT = tenant_salt("model", "tenant")
HASHES = hash_blocks(TOKENS, 4, SALT)


@pytest.fixture
def kv():
    return KVCacheManager(8, 4)


def computed(kv, hashes, num_tokens):
    """A table whose full blocks are published."""
    block_ids = kv.allocate([], num_tokens)
    kv.publish(block_ids, hashes, 0, num_tokens // 4, TOKENS)
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
    kv.pool.release(computed(kv, HASHES, 12))
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
    hashes = kv.first_hashes(HASHES[:2])
    kv.extend_hashes(hashes, TOKENS, 5, SALT)
    assert hashes == HASHES
    kv.extend_hashes(hashes, TOKENS, 3, SALT)
    assert hashes == HASHES


def test_off_is_an_empty_map():
    kv = KVCacheManager(8, 4, caches_prefixes=False)
    hashes = kv.first_hashes(HASHES)
    kv.extend_hashes(hashes, TOKENS, 5, SALT)
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
    assert kv.leader(HASHES[4]) is None
    kv.retract(leader, HASHES)
    assert kv.last_pending(HASHES, 0, 21) is None


def test_retained_context_is_found_again_when_other_traffic_has_filled_the_pool_twice_over(kv):
    kv.pool.release(computed(kv, HASHES, 13))
    kv.pool.retain(HASHES[:3], until=60.0, owner="tenant")
    assert kv.pool.num_retained == 3
    for number in range(16):
        other = list(range(1000 * number, 1000 * number + 4))
        table = kv.allocate([], 4)
        kv.publish(table, hash_blocks(other, 4, SALT), 0, 1, other)
        kv.pool.release(table)
    kv.pool.expire(59.0)
    assert len(kv.find_prefix(HASHES, 20)) == 3
    kv.pool.expire(60.0)
    assert kv.pool.num_retained == 0
    assert len(kv.find_prefix(HASHES, 20)) == 3
    kv.allocate([], 12)
    assert kv.find_prefix(HASHES, 20) == []


def test_retained_blocks_are_free_for_other_requests(kv):
    kv.pool.release(computed(kv, HASHES, 12))
    kv.pool.retain(HASHES[:3], until=60.0, owner="tenant")
    assert kv.usage == 0.0
    table = kv.allocate([], 8)
    assert len(kv.grow(table, 8)) == 6
    assert kv.pool.num_retained == 0


def test_what_is_not_cached_cannot_be_retained(kv):
    kv.pool.retain(HASHES, until=60.0, owner="tenant")
    kv.pool.release(computed(kv, HASHES, 20))
    assert kv.pool.num_retained == 0
    kv.pool.check([])


def test_events_report_a_block_exactly_while_it_can_be_found(kv):
    start = kv.events.sequence
    table, copy = computed(kv, HASHES, 8), computed(kv, HASHES, 8)
    assert kv.events.sequence == start + 2, "what could be found already is no news"
    assert kv.events.find(HASHES[1]) == (HASHES[1], HASHES[0], tuple(TOKENS[4:8]), "", "")
    kv.pool.release(copy)
    kv.pool.release(table)
    assert kv.events.sequence == start + 2
    kv.allocate([], 7 * 4)
    assert kv.events.sequence == start + 3
    assert list(kv.events.hashes) == HASHES[:1]


def test_after_the_worker_died_nothing_is_held_found_or_pending(kv):
    table = computed(kv, HASHES, 20)
    kv.pool.retain(HASHES, until=60.0, owner="tenant")
    kv.announce(object(), HASHES)
    kv.reset()
    kv.pool.check([])
    assert (kv.usage, kv.pool.num_retained, kv.find_prefix(HASHES, 20)) == (0.0, 0, [])
    assert kv.leader(HASHES[0]) is None
    assert list(kv.events.hashes) == []
    assert kv.allocate([], 20) == table


def test_what_is_held_is_not_flushed(kv):
    table = computed(kv, HASHES, 12)
    rest = kv.allocate(table, 20)
    kv.publish(rest, HASHES, 3, 5, TOKENS)
    kv.pool.release(rest)
    assert kv.pool.num_unshared(table) == 3
    assert kv.flush() == 2
    assert kv.find_prefix(HASHES, 21) == table
    assert list(kv.events.hashes) == HASHES[:3]


def test_where_waiting_sequences_part_from_a_row(kv):
    """Most of them first, and only in the part that is asked for."""
    for number, num_blocks in enumerate((1, 3, 3, 4)):
        kv.wanted.add_owner(number, HASHES[:num_blocks], lambda other: False)
    assert kv.wanted.partings(HASHES, 0, 5) == [3, 4, 1]
    assert kv.wanted.partings(HASHES, 1, 3) == [3]
    assert kv.wanted.partings(HASHES[:3], 0, 3) == [3, 1]
    assert kv.wanted.partings(HASHES, 2, 2) == []
    kv.wanted.remove(3, HASHES[:4])
    assert kv.wanted.partings(HASHES, 0, 5) == [3, 1]

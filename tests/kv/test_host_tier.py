"""Evicted blocks that host memory keeps: which slots they get, and what the manager makes of them."""

import pytest

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.kv.host_tier import HostTier
from penstock.kv.manager import KVCacheManager

BLOCK_SIZE = 4
TOKENS = list(range(100, 132))
OTHERS = list(range(200, 232))
SALT = tenant_salt("model", "tenant")
HASHES = hash_blocks(TOKENS, BLOCK_SIZE, SALT)
OTHER_HASHES = hash_blocks(OTHERS, BLOCK_SIZE, SALT)


@pytest.fixture
def kv():
    """8 blocks on the device, 6 slots."""
    return KVCacheManager(8, BLOCK_SIZE, num_host_blocks=6)


def compute(kv, token_ids, hashes):
    """A sequence from its beginning to its end; returns its table."""
    table = kv.allocate([], len(token_ids))
    kv.take_copies()
    kv.publish(table, hashes, 0, len(hashes), token_ids)
    kv.pool.release(table)
    return table


def test_blank_slots_are_taken_first_then_the_oldest():
    gone: list[bytes] = []
    tier = HostTier(2, gone.append)
    assert (tier.store(b"a"), tier.store(b"b")) == (0, 1)
    assert tier.store(b"a") is None, "it is there already, and young again"
    assert tier.store(b"c") == 1
    assert gone == [b"b"]
    assert b"a" in tier
    assert b"b" not in tier
    tier.check()
    assert (len(tier), tier.clear(), len(tier)) == (2, 2, 0)
    tier.check()


def test_what_is_copied_back_is_not_overwritten_in_the_same_plan_and_first_of_all_after_it():
    gone: list[bytes] = []
    tier = HostTier(3, gone.append)
    for block_hash in (b"tail", b"head", b"other"):
        tier.store(block_hash)
    assert (tier.restore(b"head"), tier.restore(b"tail")) == (1, 0)
    assert [tier.store(block_hash) for block_hash in (b"1", b"2")] == [2, 2]
    assert set(tier.hashes) == {b"head", b"tail", b"2"}
    tier.restore(b"2")
    assert tier.store(b"3") is None, "all slots are being copied back"
    tier.check()
    tier.settle()
    # Of a sequence the end goes first.
    assert [tier.store(block_hash) for block_hash in (b"4", b"5", b"6")] == [2, 0, 1]
    assert gone == [b"other", b"1", b"2", b"tail", b"head"]


def test_without_slots_nothing_is_kept():
    tier = HostTier(0, lambda block_hash: None)
    assert tier.store(b"a") is None
    assert (b"a" in tier, len(tier), tier.clear()) == (False, 0, 0)


def test_an_evicted_prefix_is_copied_out_and_back(kv):
    table = compute(kv, TOKENS[:16], HASHES[:4])
    other = kv.allocate([], 32)
    copies_out, copies_in = kv.take_copies()
    # The end of the sequence was evicted first.
    assert copies_out == [(block, slot) for slot, block in enumerate(reversed(table))]
    assert copies_in == []
    assert kv.take_copies() == ([], [])
    assert kv.find_prefix(HASHES, 32) == []
    assert kv.find_evicted(HASHES, 0, 32) == HASHES[:4]
    assert kv.find_evicted(HASHES, 0, 16) == HASHES[:3], "the last token is computed"
    assert kv.find_evicted(HASHES, 2, 32) == HASHES[2:4]
    assert kv.find_evicted(OTHER_HASHES, 0, 32) == []
    kv.pool.release(other)
    again = kv.allocate([], 20, restored=HASHES[:4])
    assert kv.take_copies() == ([], [(3 - index, again[index]) for index in range(4)])
    assert kv.find_prefix(HASHES, 32) == again[:4]
    assert kv.num_restored_tokens == 16
    kv.check([again])


def test_nothing_is_restored_where_there_is_no_room(kv):
    compute(kv, TOKENS[:16], HASHES[:4])
    other = kv.allocate([], 32)
    kv.take_copies()
    assert kv.allocate([], 20, restored=HASHES[:4]) is None
    assert kv.take_copies() == ([], [])
    assert kv.num_restored_tokens == 0
    kv.check([other])


def test_a_block_evicted_again_is_copied_again_only_if_its_slot_was_needed(kv):
    compute(kv, TOKENS[:16], HASHES[:4])
    kv.pool.release(kv.allocate([], 32))
    kv.take_copies()
    kv.pool.release(kv.allocate([], 16, restored=HASHES[:3]))
    kv.take_copies()
    other = kv.allocate([], 32)
    assert kv.take_copies() == ([], []), "the slots still have it"
    kv.publish(other, OTHER_HASHES, 0, 8, OTHERS)
    kv.pool.release(other)
    kv.pool.release(kv.allocate([], 16, restored=HASHES[:3]))
    copies_out, copies_in = kv.take_copies()
    assert (len(copies_out), len(copies_in)) == (3, 3), "one block of the other sequence for each that came back"
    assert not {slot for _, slot in copies_out} & {slot for slot, _ in copies_in}
    kv.check([])


def test_more_than_there_are_slots_for_lose_the_oldest(kv):
    compute(kv, TOKENS, HASHES)
    table = kv.allocate([], 32)
    copies_out, _ = kv.take_copies()
    assert len(copies_out) == len({slot for _, slot in copies_out}) == 6
    assert kv.find_evicted(HASHES, 0, 33) == HASHES[:6]
    assert list(kv.events.hashes) == HASHES[:6]
    kv.check([table])


def test_only_blocks_in_neither_tier_are_reported_as_removed(kv):
    compute(kv, TOKENS[:16], HASHES[:4])
    sequence = kv.events.sequence
    kv.pool.release(kv.allocate([], 32))
    kv.pool.release(kv.allocate([], 20, restored=HASHES[:4]))
    kv.take_copies()
    compute(kv, TOKENS[:16], HASHES[:4])  # somebody did not look for it, such as one that wants prompt_logprobs
    assert kv.events.sequence == sequence
    compute(kv, OTHERS, OTHER_HASHES)
    compute(kv, TOKENS[16:], HASHES[4:])
    assert kv.events.sequence > sequence + 12
    kv.check([])


def test_a_flush_and_a_restart_empty_the_tier(kv):
    compute(kv, TOKENS[:16], HASHES[:4])
    held = kv.allocate([], 28)
    kv.take_copies()
    assert kv.flush() == 1 + 3, "a block that is left of it, and three slots"
    assert kv.find_evicted(HASHES, 0, 32) == []
    kv.check([held])
    kv.publish(held, HASHES, 0, 7, TOKENS[:28])
    kv.pool.release(held)
    kv.allocate([], 32)
    kv.reset()
    assert kv.take_copies() == ([], [])
    assert kv.find_evicted(HASHES, 0, 32) == []
    assert list(kv.events.hashes) == []
    kv.check([])

"""Reference counts, eviction order, and the map from hash to block."""

import pytest
from hypothesis import given, settings, strategies as st

from penstock.kv.block_pool import BlockPool
from penstock.kv.retention import LeaseKind


def new_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, on_evicted=lambda block_hash, block: None)


def published(pool: BlockPool, *hashes: bytes, owner: str = "") -> list[int]:
    """Held blocks that these hashes find."""
    blocks = pool.take_blocks(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        assert pool.publish(block, block_hash, owner)
    return blocks


def evicted(pool: BlockPool) -> list[int]:
    """All blocks that are free, in the order in which they are given out."""
    order = []
    while pool.num_free:
        order += pool.take_blocks(1)
    return order


def test_blanks_are_given_out_before_cache_is_evicted():
    pool = new_pool(4)
    blocks = pool.take_blocks(3)
    pool.publish(blocks[0], b"a")
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached) == (4, 1)
    pool.take_blocks(3)
    assert pool.find(b"a") == blocks[0]
    assert pool.take_blocks(1) == [blocks[0]]
    assert pool.find(b"a") is None


def test_a_sequence_loses_its_tail_first_and_the_oldest_sequence_goes_first():
    pool = new_pool(6)
    old, new = pool.take_blocks(3), pool.take_blocks(3)
    for number, block in enumerate(old + new):
        pool.publish(block, bytes([number]))
    pool.release(old)
    pool.release(new)
    assert [pool.take_blocks(1)[0] for _ in range(6)] == [*reversed(old), *reversed(new)]


def test_a_hit_makes_a_block_young_again():
    pool = new_pool(2)
    first, second = pool.take_blocks(2)
    pool.publish(first, b"first")
    pool.publish(second, b"second")
    pool.release([first])
    pool.release([second])
    pool.share([first])
    pool.release([first])
    assert pool.take_blocks(1) == [second]


def test_a_shared_block_is_free_when_the_last_holder_is_gone():
    pool = new_pool(2)
    (block,) = pool.take_blocks(1)
    pool.share([block])
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="more often"):
        pool.release([block])


def test_the_first_block_with_a_hash_keeps_it():
    pool = new_pool(2)
    first, second = pool.take_blocks(2)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    assert pool.find(b"same") == first
    pool.release([second])
    assert pool.num_cached == 0
    pool.check([[first]])


def test_only_held_blocks_are_published():
    pool = new_pool(1)
    with pytest.raises(AssertionError, match="is not held"):
        pool.publish(0, b"hash")


def test_retained_blocks_are_evicted_last_and_by_nearest_expiry():
    pool = new_pool(8)
    late, soon, plain = published(pool, b"l0", b"l1"), published(pool, b"s0", b"s1"), published(pool, b"p0", b"p1")
    pool.release(late)
    pool.retain([b"l0", b"l1"], until=20.0, owner="a")  # once it is not held
    pool.retain([b"s0", b"s1"], until=10.0, owner="b")  # or while somebody does
    pool.release(soon)
    pool.release(plain)
    assert (pool.num_free, pool.num_cached, pool.num_retained) == (8, 6, 4)
    pool.check([])
    blanks = [6, 7]
    assert evicted(pool) == [*blanks, *reversed(plain), *reversed(soon), *reversed(late)]
    assert pool.find(b"l0") is None
    assert pool.num_retained == 0


def test_a_retained_block_goes_back_to_its_tier_until_its_time_has_come():
    pool = new_pool(4)
    blocks = published(pool, b"a", b"b")
    pool.retain([b"a", b"b"], until=10.0, owner="tenant")
    pool.release(blocks)
    pool.share(blocks[:1])
    assert pool.num_retained == 1
    pool.check([blocks[:1]])
    pool.release(blocks[:1])
    assert pool.num_retained == 2
    pool.expire(9.0)
    assert pool.num_retained == 2
    pool.share(blocks[:1])
    pool.expire(10.0)
    # What is used past its time is as young as any; what was not used lapses, and goes first.
    old = published(pool, b"old")
    pool.release(old)
    pool.release(blocks[:1])
    assert (pool.num_retained, pool.num_cached) == (0, 3)
    pool.check([])
    assert evicted(pool)[-3:] == [blocks[1], old[0], blocks[0]]


def test_the_longer_of_two_times_counts():
    pool = new_pool(4)
    blocks = published(pool, b"a", b"b", b"c")
    pool.retain([b"a", b"b"], until=30.0, owner="tenant")
    pool.retain([b"a", b"b", b"c"], until=20.0, owner="tenant")
    pool.release(blocks)
    pool.retain([b"a", b"b", b"c"], until=10.0, owner="tenant")
    pool.expire(20.0)
    assert pool.num_retained == 2
    pool.expire(30.0)
    assert pool.num_retained == 0
    # They lapsed at different times; the tail goes first all the same.
    assert evicted(pool)[1:] == list(reversed(blocks))


def test_a_branch_is_evicted_before_what_it_branched_from():
    pool = new_pool(12)
    trunk = published(pool, b"0", b"1")
    pool.share(trunk)
    one, other = trunk + published(pool, b"2"), trunk + published(pool, b"3")
    pool.retain([b"0", b"1", b"2"], until=10.0, owner="tenant")
    pool.retain([b"0", b"1", b"3"], until=10.0, owner="tenant")
    pool.release(other)
    pool.release(one)
    pool.share(one)  # the order does not depend on who was released last
    pool.release(one)
    assert evicted(pool)[-2:] == list(reversed(trunk))


def test_an_owner_of_more_than_half_gives_way_to_the_cache_of_others():
    pool = new_pool(9)
    other, cached = published(pool, b"other"), published(pool, b"cached")
    pool.retain([b"other"], until=1.0, owner="other")
    pool.release(other)
    soon, late = published(pool, b"s0", b"s1", b"s2"), published(pool, b"l0", b"l1", b"l2")
    pool.retain([b"s0", b"s1", b"s2"], until=10.0, owner="greedy")
    pool.retain([b"l0", b"l1", b"l2"], until=20.0, owner="greedy")
    for blocks in (cached, soon, late):
        pool.release(blocks)
    pool.check([])
    assert (pool.num_retained, pool.num_cached) == (7, 8)
    # Two of six are above half; then ordinary cache goes first, and then the nearest expiry.
    assert evicted(pool) == [8, *reversed(soon[1:]), *cached, *other, soon[0], *reversed(late)]


def test_the_own_cache_of_an_owner_of_more_than_half_goes_before_what_it_retains():
    pool = new_pool(8)
    cached = published(pool, b"cached", owner="greedy")
    pool.release(cached)
    blocks = published(pool, *[bytes([number]) for number in range(6)])
    pool.release(blocks)
    pool.retain([bytes([number]) for number in range(6)], until=10.0, owner="greedy")
    pool.check([])
    assert evicted(pool) == [7, *cached, *reversed(blocks)]


def test_a_block_is_retained_until_its_lease_ends():
    pool = new_pool(4)
    blocks = published(pool, b"a", b"b")
    pool.retain([b"a"], until=10.0, owner="tenant")
    pool.release(blocks)
    assert [pool.is_retained(block_hash) for block_hash in (b"a", b"b", b"c")] == [True, False, False]
    pool.expire(10.0)
    assert not pool.is_retained(b"a")


def test_a_flush_drops_only_blocks_that_are_not_held():
    pool = new_pool(4)
    kept, held = published(pool, b"a"), published(pool, b"b")
    pool.retain([b"a", b"b"], until=10.0, owner="tenant")
    pool.release(kept)
    blank = pool.take_blocks(1)
    assert pool.flush() == 1
    pool.check([held, blank])
    assert (pool.num_free, pool.num_cached) == (2, 0)
    assert (pool.find(b"a"), pool.find(b"b")) == (None, held[0])
    pool.release(held)
    assert pool.num_retained == 1
    assert pool.flush() == 1
    pool.check([blank])


def test_a_reset_releases_and_forgets_all_blocks():
    pool = new_pool(4)
    blocks = published(pool, b"a", b"b")
    pool.retain([b"a", b"b"], until=10.0, owner="tenant")
    pool.release(blocks[1:])
    pool.reset()
    pool.check([])
    assert (pool.num_free, pool.num_cached, pool.find(b"a")) == (4, 0, None)
    assert pool.take_blocks(2) == [0, 1]


def test_blocks_with_one_holder_are_counted():
    pool = new_pool(4)
    blocks = pool.take_blocks(3)
    pool.share(blocks[:1])
    assert pool.num_unshared(blocks) == 2
    assert pool.num_freed([blocks]) == 2
    assert pool.num_freed([blocks, blocks[:1]]) == 3


class TestTwoKindsOfLeases:
    """Giving up contexts does not end what was computed ahead."""

    @pytest.mark.parametrize("ahead", [10.0, 20.0, 30.0], ids=["sooner", "at the same time", "later"])
    @pytest.mark.parametrize("order", [1, -1], ids=["ahead first", "context first"])
    def test_what_was_computed_ahead_stays(self, ahead, order):
        pool = new_pool(4)
        blocks = published(pool, b"a", b"b")
        pool.release(blocks)
        leases = [(ahead, LeaseKind.AHEAD), (20.0, LeaseKind.CONTEXT)]
        for until, kind in leases[::order]:
            pool.retain([b"a", b"b"], until, "tenant", kind)
            pool.check([])
        pool.give_up([b"b", b"a"], "tenant")
        pool.check([])
        assert pool.num_retained == 2
        pool.expire(ahead - 1)
        assert pool.num_retained == 2
        pool.expire(ahead)
        assert pool.num_retained == 0
        pool.check([])

    def test_also_if_the_blocks_are_held_meanwhile(self):
        pool = new_pool(4)
        blocks = published(pool, b"a", b"b")
        pool.retain([b"a", b"b"], 10.0, "tenant", LeaseKind.AHEAD)
        pool.retain([b"a", b"b"], 20.0, "tenant")
        pool.give_up([b"b", b"a"], "tenant")
        pool.release(blocks)
        assert pool.num_retained == 2
        pool.expire(10.0)
        assert pool.num_retained == 0

    def test_one_that_has_expired_does_not_count(self):
        pool = new_pool(4)
        pool.release(published(pool, b"a"))
        pool.retain([b"a"], 10.0, "tenant", LeaseKind.AHEAD)
        pool.retain([b"a"], 20.0, "tenant")
        pool.expire(15.0)
        pool.give_up([b"a"], "tenant")
        assert pool.num_retained == 0
        pool.check([])


OPERATIONS = st.sampled_from(("take", "release", "publish", "share", "retain", "give up", "expire", "flush", "reset"))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(OPERATIONS, st.integers(0, 30)), max_size=60))
def test_the_pool_agrees_with_its_tables_after_any_operations(operations):
    known: set[bytes] = set()
    pool = BlockPool(8, on_evicted=lambda block_hash, block: known.remove(block_hash))
    tables: list[list[int]] = []
    for operation, number in operations:
        family = [bytes([number % 5, index]) for index in range(3)]
        if operation == "take" and number % 4 <= pool.num_free:
            tables.append(pool.take_blocks(number % 4))
        elif operation == "release" and tables:
            pool.release(tables.pop(number % len(tables)))
        elif operation == "publish" and tables:
            for block, block_hash in zip(tables[number % len(tables)], family, strict=False):
                if pool.publish(block, block_hash):
                    known.add(block_hash)
        elif operation == "share":
            found = [pool.find(block_hash) for block_hash in family]
            prefix = [block for block in found if block is not None]
            pool.share(prefix)
            tables.append(prefix)
        elif operation == "retain":
            kind = LeaseKind.CONTEXT if number % 3 else LeaseKind.AHEAD
            pool.retain(family, until=float(number), owner=str(number % 2), kind=kind)
        elif operation == "give up":
            pool.give_up(family, owner=str(number % 2))
        elif operation == "expire":
            pool.expire(float(number))
        elif operation == "flush" and number % 4 == 0:
            num_cached = pool.num_cached
            assert pool.flush() == num_cached
            known &= set(pool.hashes)
        elif operation == "reset" and number % 8 == 0:
            pool.reset()
            tables.clear()
            known.clear()
        pool.check(tables)
        assert known == set(pool.hashes)
    for table in tables:
        pool.release(table)
    pool.check([])
    assert pool.num_free == 8


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 3)), max_size=8), st.integers(0, 4))
def test_within_a_sequence_the_tail_is_evicted_before_the_head(turns, now):
    """Whatever was retained for how long, and whatever of it was used since."""
    pool = new_pool(16)
    for branch, length, until in turns:
        # A trunk of one block; four branches of two more.
        chain = [b"trunk", bytes([branch, 0]), bytes([branch, 1])][:length]
        table: list[int] = []
        for block_hash in chain:
            block = pool.find(block_hash)
            if block is None:
                table += published(pool, block_hash)
            else:
                pool.share([block])
                table.append(block)
        if until:
            pool.retain(chain, float(until), "tenant")
        pool.release(table)
    if all(until for _, _, until in turns):
        pool.expire(float(now))
    gone: list[bytes] = []
    while pool.num_free:
        before = set(pool.hashes)
        pool.take_blocks(1)
        gone += before - set(pool.hashes)
    for branch in range(4):
        chain = [block_hash for block_hash in (b"trunk", bytes([branch, 0]), bytes([branch, 1])) if block_hash in gone]
        order = [gone.index(block_hash) for block_hash in chain]
        assert order == sorted(order, reverse=True)

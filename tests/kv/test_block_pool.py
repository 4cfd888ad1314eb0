"""Reference counts, eviction order, and the map from hash to block."""

import pytest
from hypothesis import given, settings, strategies as st

from penstock.kv.block_pool import BlockPool


def test_blanks_are_given_out_before_cache_is_evicted():
    pool = BlockPool(4)
    blocks = pool.take(3)
    pool.publish(blocks[0], b"a")
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached) == (4, 1)
    pool.take(3)
    assert pool.find(b"a") == blocks[0]
    assert pool.take(1) == [blocks[0]]
    assert pool.find(b"a") is None


def test_a_sequence_loses_its_tail_first_and_the_oldest_sequence_goes_first():
    pool = BlockPool(6)
    old, new = pool.take(3), pool.take(3)
    for number, block in enumerate(old + new):
        pool.publish(block, bytes([number]))
    pool.release(old)
    pool.release(new)
    assert [pool.take(1)[0] for _ in range(6)] == [*reversed(old), *reversed(new)]


def test_a_hit_makes_a_block_young_again():
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.publish(first, b"first")
    pool.publish(second, b"second")
    pool.release([first])
    pool.release([second])
    pool.share([first])
    pool.release([first])
    assert pool.take(1) == [second]


def test_a_shared_block_is_free_when_the_last_holder_is_gone():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.share([block])
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="more often"):
        pool.release([block])


def test_the_first_block_with_a_hash_keeps_it():
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    assert pool.find(b"same") == first
    pool.release([second])
    assert pool.num_cached == 0
    pool.check([[first]])


def test_only_held_blocks_are_published():
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.publish(0, b"hash")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=60))
def test_the_pool_agrees_with_its_tables_after_any_operations(operations):
    pool = BlockPool(8)
    tables: list[list[int]] = []
    for operation, number in operations:
        if operation == 0 and number % 4 <= pool.num_free:
            tables.append(pool.take(number % 4))
        elif operation == 1 and tables:
            pool.release(tables.pop(number % len(tables)))
        elif operation == 2 and tables:
            for index, block in enumerate(tables[number % len(tables)]):
                pool.publish(block, bytes([number % 5, index]))
        elif operation == 3:
            found = [pool.find(bytes([number % 5, index])) for index in range(3)]
            prefix = [block for block in found if block is not None]
            pool.share(prefix)
            tables.append(prefix)
        pool.check(tables)
    for table in tables:
        pool.release(table)
    assert pool.num_free == 8

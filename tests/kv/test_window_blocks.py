"""Blocks of windowed groups: found, given up, taken and copied back."""

import pytest

from penstock.kv.block_groups import BlockGroups
from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.kv.manager import KVCacheManager
from penstock.kv.window_blocks import WindowTable

TOKENS = list(range(100, 148))
SALT = tenant_salt("model", "tenant")
HASHES = hash_blocks(TOKENS, 4, SALT)
GROUPS = BlockGroups(num_windowed=2, window=8, block_size=4, max_step_tokens=8)
"""A query after a block border sees the two blocks before it, and a step writes to three."""


def computed(kv, num_tokens):
    """The tables of a row whose tokens were computed 8 at a time, so that it has moved on."""
    window = WindowTable()
    block_ids = kv.allocate([], num_tokens)
    for end in range(8, num_tokens + 1, 8):
        assert kv.windows.hold_chunk(window, end)[1] == end
        kv.publish(block_ids, HASHES, (end - 8) // 4, end // 4, TOKENS, window=window)
        kv.windows.pass_blocks(window, end - 1)
    return block_ids, window


@pytest.mark.parametrize(("window", "num_before"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_blocks_before_a_border(window, num_before):
    assert BlockGroups(1, window, 4, 1).num_before == num_before


def test_what_a_sequence_needs_at_most():
    assert GROUPS.most_held == 2 + 2 + 1
    assert GROUPS.num_blocks_for(4) == 3
    assert GROUPS.num_blocks_for(20) == 15
    assert GROUPS.num_blocks_for(400) == 100 + 2 * 5
    assert BlockGroups(0, 1, 4, 8).num_blocks_for(400) == 100


@pytest.mark.parametrize("num_blocks", [1, 3, 14, 15, 16, 17, 100])
@pytest.mark.parametrize("groups", [GROUPS, BlockGroups(0, 1, 4, 8)])
def test_the_longest_sequence_just_fits(groups, num_blocks):
    longest = groups.longest(num_blocks)
    assert groups.num_blocks_for(longest) <= num_blocks < groups.num_blocks_for(longest + 1)


def test_a_row_holds_the_blocks_of_its_window_only():
    kv = KVCacheManager(100, 4, groups=GROUPS)
    block_ids, window = computed(kv, 48)
    assert (window.start, len(window.block_ids)) == (9, 2 * 3)
    assert kv.pool.num_blocks - kv.pool.num_free == 12 + 6
    kv.check([[*block_ids, *window.block_ids]])
    kv.release(block_ids, window)
    assert kv.pool.num_free == 100


def test_a_prefix_is_usable_where_its_window_is_found():
    kv = KVCacheManager(100, 4, groups=GROUPS)
    kv.release(*computed(kv, 48))
    assert kv.num_usable(HASHES, 12) == 12
    table = kv.windows.find(HASHES, 12)
    assert (table.start, len(table.block_ids), table.evicted) == (10, 4, {})
    # Without the blocks of one group at 9, a row may begin after 12 blocks, but not after 11 or 10.
    kv.pool.share(kv.windows.find(HASHES, 11).block_ids[1:2])
    block = kv.windows.find(HASHES, 11).block_ids[1]
    kv.pool._drop_hash(block)
    assert [kv.num_usable(HASHES, number) for number in range(13)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 12]


def test_too_few_free_blocks_shorten_a_chunk():
    kv = KVCacheManager(12, 4, groups=GROUPS)
    window = WindowTable()
    assert kv.allocate([], 28) is not None
    assert kv.windows.hold_chunk(window, 12) == ([*window.block_ids], 8)
    assert len(window.block_ids) == 4
    assert kv.windows.hold_chunk(window, 12) == ([], 8)
    assert kv.grow([], 1, window) == [11]
    assert kv.grow([], 3, window) is None


def test_evicted_windows_are_copied_back():
    kv = KVCacheManager(30, 4, 40, groups=GROUPS)
    block_ids, window = computed(kv, 24)
    contents = {key: block for key in kv.pool.hashes if (block := kv.pool.find(key)) is not None}
    kv.release(block_ids, window)
    taken = kv.pool.take_blocks(30)
    copies_out, _ = kv.take_copies()
    slot_of = dict(copies_out)
    kv.pool.release(taken)
    assert kv.find_prefix(HASHES, 25) == []
    restored = kv.find_evicted(HASHES, 0, 25)
    assert len(restored) == 6
    assert kv.num_usable(HASHES, 6) == 6
    table = kv.windows.find(HASHES, 6)
    wanted = [contents[key] for key in table.evicted.values()]
    assert len(wanted) == 4
    again = kv.allocate([], 25, 0, restored, window=table)
    assert again is not None
    assert not table.evicted
    _, copies_in = kv.take_copies()
    assert dict(copies_in) == {
        **{slot_of[contents[key]]: block for key, block in zip(restored, again, strict=False)},
        **{slot_of[old]: new for old, new in zip(wanted, table.block_ids, strict=True)},
    }
    assert kv.windows.find(HASHES, 6).block_ids == table.block_ids
    kv.check([[*again, *table.block_ids]])


def test_events_and_states_do_not_know_windows():
    kv = KVCacheManager(100, 4, groups=GROUPS)
    kv.release(*computed(kv, 48))
    assert list(kv.events.hashes) == HASHES
    assert kv.flush() == 12 + 2 * 12
    assert list(kv.events.hashes) == []
    kv.check([])


def test_what_a_continuation_needs_is_retained():
    kv = KVCacheManager(100, 4, groups=GROUPS)
    kv.release(*computed(kv, 48))
    kv.retain(HASHES, 10.0, "tenant")
    assert kv.pool.num_retained == 12 + 2 * 2
    kv.pool.take_blocks(84)
    assert kv.num_usable(HASHES, 12) == 12
    kv.give_up(HASHES, "tenant")
    assert kv.pool.num_retained == 0
    kv.pool.take_blocks(1)
    assert kv.num_usable(HASHES, 12) == 0

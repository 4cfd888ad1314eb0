"""Slots of recurrent states: who has them, which snapshots are found, and which give way."""

import random

import pytest

from penstock.kv.manager import KVCacheManager
from penstock.kv.state_pool import StatePool

SIZE = 4


def hashes(count, family=0):
    return [bytes((family, index)) for index in range(count)]


def save(pool, owner, position, block_hashes=None):
    """A row's state is saved at a border of its known history, and confirmed; returns the slot."""
    block_hashes = block_hashes or hashes(20)
    slot = pool.name_slot(owner, position, block_hashes[position // SIZE - 1])
    pool.confirm(owner, position, block_hashes, SIZE)
    return slot


def test_rows_get_slots_of_their_own_and_give_them_back():
    pool = StatePool(2)
    assert pool.start_row("a", None) == (0, None)
    assert pool.start_row("b", None) == (1, None)
    assert not pool.has_free
    assert (pool.num_used, pool.num_snapshots) == (2, 0)
    pool.end_row("a")
    assert pool.has_free
    assert pool.start_row("c", None) == (0, None)
    pool.check(())


def test_a_row_begins_with_a_snapshot_that_stays():
    pool = StatePool(4)
    pool.start_row("a", None)
    slot = save(pool, "a", 8)
    assert pool.find(hashes(2)[1]) == slot
    assert pool.start_row("b", hashes(2)[1]) == (2, slot)
    assert pool.find(hashes(2)[1]) == slot
    pool.check(hashes(20))


def test_a_plan_does_not_write_to_a_slot_from_which_a_row_begins():
    pool = StatePool(3)
    pool.start_row("a", None)
    slot = save(pool, "a", 8)
    pool.end_row("a")
    pool.start_row("b", hashes(2)[1])
    pool.start_row("c", None)
    assert not pool.has_free
    assert pool.name_slot("c", 4, None) is None
    pool.complete_plan()
    assert pool.has_free
    assert pool.start_row("d", None) == (slot, None)
    pool.check(hashes(20))


def test_the_last_free_slot_is_taken_over_with_its_state():
    pool = StatePool(2)
    pool.start_row("a", None)
    slot = save(pool, "a", 8)
    assert pool.start_row("b", hashes(2)[1]) == (slot, slot)
    assert pool.find(hashes(2)[1]) is None
    pool.check(())


def test_a_snapshot_is_found_before_it_is_confirmed_but_does_not_give_way():
    pool = StatePool(2)
    pool.start_row("a", None)
    slot = pool.name_slot("a", 4, hashes(1)[0])
    assert pool.find(hashes(1)[0]) == slot
    assert not pool.has_free
    pool.confirm("a", 4, hashes(1), SIZE)
    assert pool.has_free
    pool.check(hashes(1))


def test_a_border_is_found_once_its_hash_is_known():
    pool = StatePool(3)
    pool.start_row("a", None)
    slot = pool.name_slot("a", 8, None, is_passed=True)
    pool.confirm("a", 7, hashes(1), SIZE)
    assert pool.find(hashes(2)[1]) is None
    pool.confirm("a", 9, hashes(2), SIZE)
    assert pool.find(hashes(2)[1]) == slot


def test_an_earlier_border_is_given_up():
    pool = StatePool(4)
    pool.start_row("a", None)
    for position in (4, 8, 12):
        pool.name_slot("a", position, None, is_passed=True)
        pool.confirm("a", position, hashes(3), SIZE)
        pool.give_up_passed("a", 20)
    assert [pool.find(block_hash) is not None for block_hash in hashes(3)] == [False, False, True]
    assert pool.num_snapshots == 1
    pool.end_row("a")
    assert pool.num_snapshots == 1
    pool.check(hashes(3))


def test_a_border_stays_until_the_text_is_beyond_the_next_one():
    pool = StatePool(4)
    pool.start_row("a", None)
    for position in (4, 8, 12):
        pool.name_slot("a", position, None, is_passed=True)
    pool.confirm("a", 13, hashes(3), SIZE)
    pool.give_up_passed("a", 11)
    assert [pool.find(block_hash) is not None for block_hash in hashes(3)] == [False, True, True]
    pool.check(hashes(3))


def test_a_border_from_which_another_row_has_begun_stays():
    pool = StatePool(4)
    pool.start_row("a", None)
    pool.name_slot("a", 4, None, is_passed=True)
    pool.confirm("a", 4, hashes(1), SIZE)
    pool.start_row("b", hashes(1)[0])
    pool.name_slot("a", 8, None, is_passed=True)
    pool.confirm("a", 8, hashes(2), SIZE)
    pool.give_up_passed("a", 20)
    assert pool.find(hashes(1)[0]) is not None
    pool.check(hashes(2))


def test_the_least_recently_used_snapshot_gives_way():
    pool = StatePool(4)
    pool.start_row("a", None)
    slots = [save(pool, "a", position) for position in (4, 8, 12)]
    pool.end_row("a")
    pool.start_row("b", hashes(1)[0])
    pool.complete_plan()
    assert pool.start_row("c", None) == (slots[1], None)
    assert [pool.find(block_hash) is not None for block_hash in hashes(3)] == [True, False, True]


def test_snapshots_of_retained_blocks_go_last_up_to_half_of_the_slots():
    retained = set(hashes(2))
    pool = StatePool(6, is_retained=retained.__contains__)
    pool.start_row("a", None)
    slots = [save(pool, "a", position) for position in (4, 8, 12, 16, 20)]
    assert pool.start_row("b", None) == (slots[2], None)
    retained.update(hashes(5))
    assert pool.start_row("c", None) == (slots[0], None)
    pool.check(hashes(20))


def test_a_row_that_leaves_keeps_what_was_computed_and_loses_what_was_not():
    pool = StatePool(4)
    pool.start_row("a", None)
    pool.name_slot("a", 4, hashes(1)[0])
    pool.name_slot("a", 8, None, is_passed=True)
    pool.end_row("a")
    assert (pool.num_used, pool.num_snapshots) == (1, 1)
    assert pool.find(hashes(1)[0]) is not None
    pool.check(hashes(1))


def test_two_rows_with_the_same_history_save_one_state():
    pool = StatePool(6)
    pool.start_row("a", None)
    pool.start_row("b", None)
    for owner in ("a", "b"):
        pool.name_slot(owner, 4, None, is_passed=True)
    for owner in ("a", "b"):
        pool.confirm(owner, 4, hashes(1), SIZE)
    assert pool.num_snapshots == 1
    assert pool.name_slot("b", 4, hashes(1)[0]) is None
    pool.check(hashes(1))


def test_others_wait_for_a_state_until_its_row_saves_it_or_cannot():
    pool = StatePool(3)
    pool.start_row("a", None)
    pool.announce("a", 8, hashes(2)[1])
    pool.announce("a", 12, hashes(3)[2])
    assert pool.leader(hashes(2)[1]) == "a"
    assert pool.take_wanted("a", 11) == [(8, True)]
    assert pool.leader(hashes(2)[1]) is None
    pool.retract("a")
    assert pool.leader(hashes(3)[2]) is None
    assert pool.take_wanted("a", 12) == [(12, True)]
    pool.check(())


def test_a_snapshot_goes_with_its_block():
    """Not when the block moves to host memory, but when it cannot be found any more."""
    kv = KVCacheManager(4, SIZE, num_host_blocks=1, num_state_slots=4)
    token_ids = list(range(12))
    block_hashes: list[bytes] = []
    kv.extend_hashes(block_hashes, token_ids, 3, b"")
    block_ids = kv.allocate([], 12)
    assert block_ids is not None
    kv.publish(block_ids, block_hashes, 0, 3, token_ids)
    kv.states.start_row("a", None)
    for position in (4, 8, 12):
        save(kv.states, "a", position, block_hashes)
    kv.states.end_row("a")
    kv.pool.release(block_ids)
    assert kv.num_usable(block_hashes, 3) == 3
    kv.pool.take_blocks(2)  # the last block goes to host memory
    assert kv.states.num_snapshots == 3
    kv.pool.take_blocks(1)  # and makes room for the one before it
    assert [kv.states.find(block_hash) is not None for block_hash in block_hashes] == [True, True, False]
    assert kv.flush() == 2
    assert kv.states.num_used == 0


def test_a_prefix_ends_with_a_saved_state():
    kv = KVCacheManager(4, SIZE, num_state_slots=4)
    block_ids = kv.allocate([], 12)
    assert block_ids is not None
    kv.publish(block_ids, hashes(3), 0, 3, list(range(12)))
    assert kv.num_usable(hashes(3), 3) == 0
    kv.states.start_row("a", None)
    save(kv.states, "a", 8)
    assert [kv.num_usable(hashes(3), num_found) for num_found in range(4)] == [0, 0, 2, 2]
    assert KVCacheManager(4, SIZE).num_usable(hashes(3), 3) == 3


@pytest.mark.parametrize("seed", range(20))
def test_random_operations(seed):
    rng = random.Random(seed)
    pool = StatePool(rng.randint(1, 8))
    rows: dict[int, list[int]] = {}
    for number in range(300):
        operation = rng.randrange(6)
        if operation == 0 and pool.has_free:
            found = [block_hash for family in range(3) for block_hash in hashes(5, family) if pool.find(block_hash)]
            pool.start_row(number, rng.choice([*found, None]))
            rows[number] = [rng.randrange(3), 0, SIZE]  # family, position, next border
        elif operation == 1:
            pool.complete_plan()
        elif operation == 2:
            pool.drop(rng.choice(hashes(5, rng.randrange(3))))
        elif rows:
            owner = rng.choice(list(rows))
            family, position, border = rows[owner]
            if operation == 3 and border <= 5 * SIZE:
                block_hash = hashes(5, family)[border // SIZE - 1] if rng.random() < 0.5 else None
                pool.name_slot(owner, border, block_hash, is_passed=rng.random() < 0.5)
                rows[owner][2] += SIZE
            elif operation == 4:
                rows[owner][1] = position = min(position + rng.randint(0, SIZE), border - 1)
                pool.confirm(owner, position, hashes(5, family), SIZE)
                pool.give_up_passed(owner, position)
            elif operation == 5 and rng.random() < 0.3:
                pool.end_row(owner)
                del rows[owner]
        pool.check([block_hash for family in range(3) for block_hash in hashes(5, family)])
        assert pool.num_used - pool.num_snapshots == len(rows)

"""Planted bugs in the handling of recurrent states: the state machine must find every one of them."""

import pytest

from penstock.kv.manager import KVCacheManager
from penstock.kv.state_pool import StatePool
from penstock.scheduler.planning.row_states import RowStates


def row_begins_without_its_state(patch):
    patch.setattr(KVCacheManager, "num_usable", lambda kv, hashes, num_found: num_found)


def state_slot_not_given_back(patch):
    end_row = StatePool.end_row

    def end_and_keep(pool, owner):
        end_row(pool, owner)
        pool._blanks.pop()

    patch.setattr(StatePool, "end_row", end_and_keep)


def states_kept_over_a_restart(patch):
    reset = StatePool.reset
    patch.setattr(StatePool, "reset", lambda pool: None if hasattr(pool, "_rows") else reset(pool))


def snapshot_that_outlives_its_block(patch):
    patch.setattr(StatePool, "drop", lambda pool, block_hash: None)


def border_confirmed_before_it_is_passed(patch):
    confirm = StatePool.confirm

    def confirm_early(pool, owner, num_computed, hashes, block_size):
        confirm(pool, owner, len(hashes) * block_size, hashes, block_size)

    patch.setattr(StatePool, "confirm", confirm_early)


def slot_given_out_before_its_result(patch):
    name_slot = StatePool.name_slot

    def name_and_cache(pool, owner, position, block_hash, *, is_passed=False):
        slot = name_slot(pool, owner, position, block_hash, is_passed=is_passed)
        if slot is not None and block_hash is not None:
            del pool._rows[owner].named[position]
            pool._cached[slot] = None
        return slot

    patch.setattr(StatePool, "name_slot", name_and_cache)


def source_overwritten_by_its_own_plan(patch):
    start_row = StatePool.start_row

    def start_and_complete(pool, owner, source_hash):
        slots = start_row(pool, owner, source_hash)
        pool.complete_plan()
        return slots

    patch.setattr(StatePool, "start_row", start_and_complete)


def border_named_twice(patch):
    save_borders = RowStates._save_borders

    def save_from_the_end(states, plan, sequence):
        row = states._pool.row(sequence)
        row.next_border = min(row.next_border, -(-len(sequence.token_ids) // 4) * 4)
        save_borders(states, plan, sequence)

    patch.setattr(RowStates, "_save_borders", save_from_the_end)


def awaited_for_ever(patch):
    patch.setattr(StatePool, "_retract", lambda pool, leader, block_hash: None)


PLANTED_BUGS = [
    row_begins_without_its_state,
    state_slot_not_given_back,
    pytest.param(states_kept_over_a_restart, marks=pytest.mark.soak),
    pytest.param(snapshot_that_outlives_its_block, marks=pytest.mark.soak),
    border_confirmed_before_it_is_passed,
    slot_given_out_before_its_result,
    pytest.param(source_overwritten_by_its_own_plan, marks=pytest.mark.soak),
    border_named_twice,
    awaited_for_ever,
]


@pytest.mark.parametrize("plant", PLANTED_BUGS, ids=lambda plant: plant.__name__)
def test_planted_bug_is_caught(explore, stateful_world_type, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        explore(stateful_world_type, 2000, 20, shrink=False)

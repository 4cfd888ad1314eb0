"""What waiting sequences and preempted rows compute again for lack of a saved state counts as work."""

import pytest
from known_requests import make_config, make_prompt

from penstock.scheduler.policy import Policy

PROMPT = make_prompt(33)
"""Of eight blocks, and a token."""


@pytest.fixture
def new_world(world_type):
    def make(num_state_slots=12, **changes):
        return world_type(60, make_config(**changes), num_state_slots=num_state_slots)

    return make


def fill_cache(world, new_request, prompt=PROMPT):
    """Computes a prompt, and one token, which is not in the cache."""
    world.add(new_request("first", prompt, max_tokens=1))
    world.drain()


def drop_states(world, hashes):
    for block_hash in hashes:
        world.scheduler.kv.states.drop(block_hash)


def waiting_tokens(world, *names):
    """The tokens that each of these waiting requests has to compute."""
    world.check()
    return [world.scheduler.requests[name].sequences[0].work.tokens for name in names]


@pytest.mark.parametrize(("num_state_slots", "num_tokens"), [(0, 1), (12, 33)])
def test_cached_tokens_without_a_state_are_work(new_world, new_request, num_state_slots, num_tokens):
    world = new_world(num_state_slots, max_num_seqs=1)
    fill_cache(world, new_request)
    world.add(new_request("runs", make_prompt(3, first=5), max_tokens=9))
    world.step()
    second = new_request("second", PROMPT, max_tokens=1)
    drop_states(world, second.first_hashes(0))
    world.add(second)
    assert waiting_tokens(world, "second") == [num_tokens]
    world.drain()


def test_states_that_come_and_go_change_the_work(new_world, new_request):
    world = new_world(max_num_seqs=1, max_num_batched_tokens=8)
    fill_cache(world, new_request)
    second = new_request("second", PROMPT, max_tokens=1)
    drop_states(world, second.first_hashes(0))
    world.add(new_request("runs", PROMPT[:25], max_tokens=9))
    world.step()
    world.add(second)
    assert waiting_tokens(world, "second") == [33 - 24]  # the row will save its state after its prompt
    for _ in range(5):
        world.step()
    assert world.scheduler.kv.states.find(second.first_hashes(0)[5]) is not None
    assert waiting_tokens(world, "second") == [33 - 24]
    drop_states(world, second.first_hashes(0))
    assert waiting_tokens(world, "second") == [33]
    world.drain()


def test_only_the_first_of_several_computes_a_prefix_again(new_world, new_request):
    world = new_world(max_num_seqs=1)
    fill_cache(world, new_request)
    world.add(new_request("runs", make_prompt(3, first=5), max_tokens=9))
    world.step()
    requests = [new_request(name, [*PROMPT[:32], *tail], max_tokens=1) for name, tail in (("a", [1]), ("b", [2, 3]))]
    drop_states(world, requests[0].first_hashes(0))
    for request in requests:
        world.add(request)
    assert waiting_tokens(world, "a", "b") == [33, 2]
    world.drain()
    assert world.scheduler.counters.state_missed_tokens == 32


def test_a_flush_leaves_nothing_to_count_twice(new_world, new_request):
    world = new_world(max_num_seqs=1)
    fill_cache(world, new_request)
    world.add(new_request("runs", make_prompt(3, first=5), max_tokens=9))
    world.step()
    second = new_request("second", PROMPT, max_tokens=1)
    drop_states(world, second.first_hashes(0))
    world.add(second)
    world.scheduler.kv.flush()
    [sequence] = world.scheduler.requests["second"].sequences
    assert (sequence.num_missing, sequence.num_stateless) == (8, 0)
    assert waiting_tokens(world, "second") == [33]
    world.drain()


@pytest.mark.parametrize(("lost", "preempted"), [("", "short"), ("short", "long")])
def test_the_row_with_the_least_to_compute_again_is_preempted(new_world, new_request, lost, preempted):
    """A row with a state at its last border begins there, if its blocks stay. One without begins at 0."""
    world = new_world(policy=Policy.PRIORITY, max_num_seqs=2)
    for name, length in (("long", 18), ("short", 14)):
        world.add(new_request(name, make_prompt(length, first=length), max_tokens=20, priority=1))
    for _ in range(4):
        world.step()
    if lost:
        [sequence] = world.scheduler.requests[lost].sequences
        drop_states(world, sequence.hashes)
    world.add(new_request("urgent", make_prompt(3, first=5), max_tokens=1, priority=0))
    world.step()
    rows = {name: world.scheduler.requests[name].sequences[0].row for name in ("long", "short")}
    assert [name for name, row in rows.items() if row < 0] == [preempted]
    world.drain()

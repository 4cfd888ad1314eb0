"""Where the states of rows are saved, and what is left of them when rows end early, wait, or lose their worker."""

import pytest
from known_requests import BLOCK_SIZE, make_config, make_prompt
from worlds import run

from penstock.scheduler.plan import NO_SLOT, Pooling, SamplingParams, StateSnapshot
from penstock.scheduler.policy import Policy
from penstock.scheduler.request import EngineFinishReason
from penstock.scheduler.timeline_entry import BeganDetail, EntryKind, WaitCause, WaitDetail


@pytest.fixture
def new_world(world_type):
    def make(num_blocks=60, num_state_slots=12, num_host_blocks=0, **changes):
        tier = {"num_state_slots": num_state_slots, "num_host_blocks": num_host_blocks}
        return world_type(num_blocks, make_config(**changes), **tier)

    return make


def saved(plans):
    return [snapshot.position for plan in plans for snapshot in plan.snapshots]


def cached(world, name):
    """With how many cached tokens a request has begun, each time."""
    entries = world.scheduler.explain(name).entries()
    return [entry.num_tokens for entry in entries if entry.kind is EntryKind.BEGAN]


def test_a_model_without_recurrent_layers_has_no_slots(new_world, new_request):
    _, plans = run(new_world(num_state_slots=0), new_request, "one", make_prompt(18), max_tokens=12)
    assert saved(plans) == []
    assert {(row.state_slot, row.state_source) for plan in plans for row in plan.added} == {(NO_SLOT, NO_SLOT)}


@pytest.mark.parametrize(
    ("length", "max_tokens", "positions"),
    [
        (3, 1, []),  # nothing reaches a border
        (18, 1, [16]),  # the end of the prompt
        (18, 12, [16, 20, 24, 28]),  # and each border on the way
        (16, 4, [12, 16]),  # the end of a history that is a border: its last token may have to be computed again
        (17, 4, [16, 20]),
    ],
)
def test_states_are_saved_at_the_end_of_a_prompt_and_at_borders(new_world, new_request, length, max_tokens, positions):
    world = new_world()
    _, plans = run(world, new_request, "one", make_prompt(length), max_tokens=max_tokens)
    assert saved(plans) == positions
    # Of the borders, only the last one stays.
    prompt_end = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert world.scheduler.kv.states.num_snapshots == len(set(positions) & {prompt_end, *positions[-1:]})


def test_a_position_inside_a_chunk_is_saved_by_the_plan_that_computes_it(new_world, new_request):
    _, plans = run(new_world(max_num_batched_tokens=7), new_request, "one", make_prompt(18), max_tokens=1)
    [plan] = [plan for plan in plans if plan.snapshots]
    assert [(chunk.start, chunk.end) for chunk in plan.chunks] == [(14, 18)]
    [snapshot] = plan.snapshots
    assert snapshot == StateSnapshot(plan.chunks[0].row, 16, snapshot.slot)


@pytest.mark.parametrize("max_drafts", [1, 3, 7])
def test_drafts_may_pass_several_borders_in_a_step(new_world, new_request, max_drafts):
    """Each has a slot of its own before the plan that may reach it."""
    world = new_world()
    _, plans = run(world, new_request, "one", make_prompt(6), max_tokens=30, max_drafts=max_drafts)
    assert saved(plans) == [4, *range(8, 36, 4)]
    assert max(len(plan.snapshots) for plan in plans) >= (max_drafts + 1) // BLOCK_SIZE
    assert world.scheduler.kv.states.num_snapshots == 2
    again, _ = run(world, new_request, "again", make_prompt(6) + world.received["one"].token_ids[0], max_tokens=1)
    assert again.finished.usage.cached_tokens == 32


@pytest.mark.parametrize("grammar", [" ", "  ", "    "])
def test_a_mask_that_is_late_at_a_border(new_world, new_request, grammar):
    """The last token of the prompt is computed again: its state is found once a result confirms it."""
    world = new_world()
    received = world.add(new_request("late", make_prompt(16), max_tokens=6, grammar=grammar))
    world.next_plan()
    world.next_plan()
    world.answer()
    [sequence] = world.scheduler.requests["late"].sequences
    assert world.scheduler.kv.num_usable(sequence.hashes, 4) == 3
    world.drain()
    assert received.finished.usage.output_tokens == 6


def test_a_row_that_is_cancelled_leaves_what_it_had(new_world, new_request):
    world = new_world()
    received = world.add(new_request("one", make_prompt(6), max_tokens=30))
    for _ in range(10):
        world.step()
    assert world.scheduler.abort("one", EngineFinishReason.CANCELLED)
    world.drain()
    history = make_prompt(6) + received.token_ids[0]
    run(world, new_request, "next", [*history, 1, 2], max_tokens=1)
    assert cached(world, "next") == [(len(history) - 1) // BLOCK_SIZE * BLOCK_SIZE]


def test_what_a_stopped_row_computed_beyond_its_end_costs_no_state_before_it(new_world, new_request):
    """Drafts may be accepted after a stop token, and across a border. The one before is still there."""
    for length in range(3, 15):
        world = new_world()
        full, _ = run(world, new_request, "full", make_prompt(length), max_tokens=24, max_drafts=7)
        stop_at = full.token_ids[0][10]
        world = new_world()
        sampling = SamplingParams(stop_token_ids=(stop_at,))
        received, _ = run(
            world, new_request, "one", make_prompt(length), max_tokens=24, max_drafts=7, sampling=sampling
        )
        history = make_prompt(length) + received.token_ids[0]
        run(world, new_request, "next", [*history, 1, 2], max_tokens=1)
        [num_cached] = cached(world, "next")
        assert len(history) - num_cached <= 1 + BLOCK_SIZE, f"{num_cached} of {len(history)} tokens are cached"


def test_a_preempted_row_begins_at_its_last_border(new_world, new_request):
    world = new_world()
    for first, name in enumerate(("stays", "preempted")):
        world.add(new_request(name, make_prompt(18, first), max_tokens=14))
    for _ in range(6):
        world.step()
    num_tokens = len(world.scheduler.requests["preempted"].sequences[0].token_ids)
    world.scheduler.reconfigure(make_config(max_num_seqs=1))
    world.drain()
    assert cached(world, "preempted") == [0, (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE]
    assert world.scheduler.counters.state_hits == 1


def test_after_an_injection_a_row_continues_at_its_last_border(new_world, new_request):
    world = new_world()
    received = world.add(new_request("one", make_prompt(18), max_tokens=12))
    for _ in range(6):
        world.step()
    received.to_inject += [3, 4]
    assert world.scheduler.inject("one", [3, 4])
    num_tokens = len(world.scheduler.requests["one"].sequences[0].token_ids)
    world.drain()
    first, second = cached(world, "one")
    assert (first, second) == (0, (num_tokens - 3) // BLOCK_SIZE * BLOCK_SIZE)


def test_a_worker_that_dies_takes_all_states(new_world, new_request):
    world = new_world()
    world.add(new_request("one", make_prompt(18), max_tokens=12))
    for _ in range(6):
        world.step()
    world.recover(blames_step=False)
    assert world.scheduler.kv.states.num_used == 0
    world.drain()
    assert cached(world, "one") == [0, 0]


def test_a_flush_drops_the_states_of_blocks_that_are_not_held(new_world, new_request):
    world = new_world()
    run(world, new_request, "one", make_prompt(18), max_tokens=2)
    world.add(new_request("two", make_prompt(18, first=3), max_tokens=9))
    world.step()
    world.scheduler.kv.flush()
    world.check()
    assert world.scheduler.kv.states.num_snapshots == 1
    world.drain()


def test_prompts_that_only_end_in_a_vector_save_no_state(new_world, new_request):
    world = new_world()
    _, plans = run(world, new_request, "one", make_prompt(18), max_tokens=0, pooling=Pooling.LAST)
    assert saved(plans) == []


def test_rows_run_as_far_as_there_are_slots(new_world, new_request):
    world = new_world(num_state_slots=2)
    for name in "abc":
        world.add(new_request(name, make_prompt(6, first=ord(name)), max_tokens=9))
    assert [len(world.next_plan().added), len(world.next_plan().added)] == [2, 0]
    world.drain()
    waits = [entry.detail for entry in world.scheduler.explain("c").entries() if entry.kind is EntryKind.WAITED]
    assert WaitDetail(WaitCause.ROWS, (2,)) in waits


def test_a_row_waits_for_a_slot_until_a_state_is_saved(new_world, new_request):
    world = new_world(num_state_slots=2)
    world.add(new_request("one", make_prompt(18), max_tokens=9))
    world.next_plan()
    world.add(new_request("two", make_prompt(6, first=3), max_tokens=3))
    assert not world.next_plan().added  # the end of the first one's prompt has the other slot
    world.answer()
    assert [row.state_slot for row in world.next_plan().added] == [1]
    world.drain()
    waits = [entry.detail for entry in world.scheduler.explain("two").entries() if entry.kind is EntryKind.WAITED]
    assert WaitDetail(WaitCause.STATES, (2,)) in waits


def test_a_held_row_gives_its_slots_to_one_that_waits(new_world, new_request):
    """One of them is for a border that it has not reached: its drafts were rejected."""
    world = new_world(num_state_slots=2)
    world.add(new_request("held", make_prompt(6), max_tokens=20, max_drafts=5))
    while not any(row.named for row in world.scheduler.kv.states._rows.values()):
        world.step()
    world.scheduler.hold("held", True)
    world.add(new_request("two", make_prompt(6, first=3), max_tokens=3))
    while world.received["two"].finished is None:
        world.schedule()
        world.answer()
        world.check()
    world.drain()


@pytest.mark.parametrize("policy", list(Policy))
def test_policies_and_few_slots(new_world, new_request, policy):
    """Urgent requests, other tenants and deadlines, with fewer slots than rows."""
    world = new_world(num_blocks=20, num_state_slots=3, policy=policy)
    for number in range(40):
        world.add_random(1000 * list(Policy).index(policy) + number)
        world.schedule()
        world.check()
        if number % 2:
            world.answer()
    world.drain()


@pytest.mark.parametrize("keeps_state", [True, False])
def test_a_prefix_that_comes_back_from_host_memory_needs_its_state(new_world, new_request, keeps_state):
    """States are not evicted to host memory: they stay in their slots, or are lost."""
    world = new_world(num_blocks=11, num_state_slots=12 if keeps_state else 2, num_host_blocks=40)
    prompt = make_prompt(33)
    run(world, new_request, "first", prompt, max_tokens=2)
    for first in (2, 3):
        run(world, new_request, f"other {first}", make_prompt(40, first=first), max_tokens=2)
    run(world, new_request, "again", prompt, max_tokens=2)
    assert cached(world, "again") == [32 if keeps_state else 0]
    assert world.scheduler.counters.state_misses == (0 if keeps_state else 1)
    [began] = [entry for entry in world.scheduler.explain("again").entries() if entry.kind is EntryKind.BEGAN]
    assert began.detail == (None if keeps_state else BeganDetail(32))


def test_an_urgent_request_preempts_no_row_for_a_slot_that_is_free_soon(new_world, new_request):
    world = new_world(num_state_slots=2, policy=Policy.PRIORITY)
    world.add(new_request("one", make_prompt(18), max_tokens=9, priority=1))
    world.next_plan()
    world.add(new_request("urgent", make_prompt(6, first=3), max_tokens=3, priority=0))
    world.next_plan()
    assert world.scheduler.counters.preemptions == 0
    world.answer()
    assert len(world.next_plan().added) == 1
    world.drain()
    assert world.scheduler.counters.preemptions == 0

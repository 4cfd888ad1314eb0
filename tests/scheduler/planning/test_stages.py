"""Steps of a model that is divided into stages: rows by turns, so that every stage has a step to compute."""

from collections import Counter

import pytest
from known_requests import make_prompt

from penstock.scheduler.config import SchedulerConfig

MAX_TOKENS = 20


@pytest.fixture
def new_world(world_type):
    def make(budget=64, **facts):
        return world_type(64, SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget), budget, **facts)

    return make


def run(world, num_stages):
    """The rows that decode in each plan, with as many plans in flight as there may be."""
    plans = []
    while True:
        while len(world.plans) < num_stages + 1 and world.schedule():
            world.check()
            plans.append(world.plans[-1])
        if not world.answer():
            return plans
        world.check()


def add_rows(world, new_request, number):
    for name in range(number):
        world.add(new_request(str(name), make_prompt(4), max_tokens=MAX_TOKENS))


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8])
def test_rows_take_turns(new_world, new_request, num_stages, num_rows):
    world = new_world(stage_layers=(1,) * num_stages)
    add_rows(world, new_request, num_rows)
    plans = [[decode.row for decode in plan.decodes] for plan in run(world, num_stages)]
    assert all(len(received.token_ids[0]) == MAX_TOKENS for received in world.received.values())
    middle = plans[2 * num_stages : -2 * num_stages]
    groups = min(num_rows, num_stages)
    for at in range(len(middle) - num_stages):
        turns = middle[at : at + num_stages]
        assert max(map(len, turns)) <= -(-num_rows // num_stages), "one step has more than its share"
        if num_rows >= num_stages:
            assert max(Counter(row for turn in turns for row in turn).values()) == 1, "a row waits for itself"
    # Each row needs a step for each token, and a stage is idle only where there are fewer rows than stages.
    assert len(plans) <= 1 + (MAX_TOKENS + 2) * groups


def test_chunks_of_a_prompt_follow_one_another(new_world, new_request):
    world = new_world(budget=8, stage_layers=(1, 1))
    world.add(new_request("long", make_prompt(32), max_tokens=2))
    for _ in range(3):
        assert world.schedule()
    assert [[(chunk.start, chunk.end) for chunk in plan.chunks] for plan in world.plans] == [
        [(0, 8)],
        [(8, 16)],
        [(16, 24)],
    ]
    assert not world.schedule(), "more plans than stages can hold"


def test_without_stages_a_row_is_in_every_plan(new_world, new_request):
    world = new_world()
    add_rows(world, new_request, 4)
    plans = run(world, 1)
    assert {len(plan.decodes) for plan in plans[2:-4]} == {4}

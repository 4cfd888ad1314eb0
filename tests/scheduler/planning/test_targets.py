"""Targets for the first token order the queue and refuse requests; targets between tokens limit prefill chunks. Neither
ends a request."""

import pytest
from known_requests import make_config, make_prompt

from penstock.scheduler.policy import PATIENCE_S, Policy
from penstock.scheduler.request import EngineFinishReason, RefusalKind, Refused


def queued(world, new_request, *requests):
    """Puts requests behind one that has the only row; returns the order in which they begin."""
    world.add(new_request("running", make_prompt(4), max_tokens=6, arrival=world.now, priority=-1))
    world.step()
    for number, (name, fields) in enumerate(requests, start=1):
        request = new_request(name, make_prompt(4, first=number), max_tokens=2, **{"arrival": world.now} | fields)
        assert world.add(request) is not None
    begun = []
    while world.alive():
        begun += world.step()
    assert {received.finished.reason for received in world.received.values()} == {EngineFinishReason.LENGTH}
    return begun


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.DEADLINE, Policy.FAIR])
def test_the_earliest_target_goes_first(world_type, new_request, policy):
    world = world_type(100, make_config(max_num_seqs=1, policy=policy))
    timed = [(str(target), {"first_token_target": world.now + target}) for target in (50, 30, 40)]
    assert queued(world, new_request, ("none", {}), *timed) == ["30", "40", "50", "none"]


def test_a_target_counts_within_its_priority(world_type, new_request):
    world = world_type(100, make_config(max_num_seqs=1, policy=Policy.PRIORITY))
    requests = (
        ("low", {"first_token_target": world.now + 1, "priority": 1}),
        ("high", {"priority": 0}),
        ("high soon", {"first_token_target": world.now + 30, "priority": 0}),
    )
    assert queued(world, new_request, *requests) == ["high soon", "high", "low"]


def test_a_request_without_a_target_does_not_starve(world_type, new_request):
    world = world_type(100, make_config(max_num_seqs=1))
    world.add(new_request("running", make_prompt(4), max_tokens=6))
    world.step()
    world.add(new_request("none", make_prompt(4, first=1), max_tokens=2))
    world.now += PATIENCE_S
    world.add(new_request("soon", make_prompt(4, first=2), max_tokens=2, first_token_target=world.now + 10))
    begun = []
    while world.alive():
        begun += world.step()
    assert begun == ["none", "soon"]


def test_a_missed_target_ends_nothing(world_type, new_request):
    world = world_type(100, make_config(max_num_seqs=1))
    order = queued(world, new_request, ("late", {"first_token_target": world.now + 2}))
    assert order == ["late"]
    assert world.now > 4


class TestRefusals:
    """A request whose first token is predicted to be late is refused on arrival."""

    @pytest.fixture
    def world(self, world_type):
        world = world_type(100, make_config(max_num_batched_tokens=8))
        world.learn_step_time()
        return world

    def refusal(self, world, request):
        with pytest.raises(Refused) as refused:
            world.scheduler.add_request(request)
        assert refused.value.kind is RefusalKind.OVERLOADED
        return refused.value

    def test_behind_others(self, world, new_request):
        world.add(new_request("first", make_prompt(32, first=3), max_tokens=9, arrival=world.now))
        world.step()
        target = {"first_token_target": world.now + 2.0, "arrival": world.now}
        refused = self.refusal(world, new_request("late", make_prompt(16), max_tokens=2, **target))
        assert "its first token would come in" in refused.message
        assert refused.retry_after_ms > 0
        assert world.scheduler.counters.refused == 1
        assert world.add(new_request("patient", make_prompt(16), max_tokens=2, first_token_target=world.now + 50))
        world.drain()

    def test_alone_without_a_hint_to_try_again(self, world, new_request):
        target = {"first_token_target": world.now + 0.01, "arrival": world.now}
        assert self.refusal(world, new_request("hasty", make_prompt(16), max_tokens=2, **target)).retry_after_ms is None

    def test_once_the_target_has_passed(self, world_type, new_request):
        world = world_type(100, make_config())
        refused = self.refusal(world, new_request("past", make_prompt(4), first_token_target=world.now - 1.0))
        assert "1 s ago" in refused.message

    def test_a_prediction_that_was_not_tested_for_long_refuses_nothing(self, world, new_request):
        world.now += 100
        assert world.add(new_request("hasty", make_prompt(16), max_tokens=2, first_token_target=world.now + 0.01))
        world.drain()


@pytest.fixture
def chunk_beside(world_type, new_request):
    """Returns the length of a long prompt's first chunk in a step with rows with these targets."""

    def chunk_beside(*targets, **config):
        world = world_type(400, make_config(max_num_batched_tokens=40, **config))
        world.step_us = 0
        world.row_us = 0
        model = world.scheduler.predictor._model
        model.max_prefill = lambda decodes, kv, context, target_s, most: min(most, int(10 * (target_s or 3.0)))
        for number, target_itl_s in enumerate(targets):
            prompt = make_prompt(4, first=number)
            world.add(new_request(str(number), prompt, max_tokens=30, target_itl_s=target_itl_s))
        world.step()
        world.step()
        world.add(new_request("long", make_prompt(43, first=6), max_tokens=1))
        (chunk,) = world.next_plan().chunks
        return chunk.end - chunk.start

    return chunk_beside


def test_a_step_keeps_the_lowest_target_of_its_rows(chunk_beside):
    assert chunk_beside(None) == 30, "the default"
    assert chunk_beside(1.0) == 10
    assert chunk_beside(2.0, 1.5, None) == 15
    assert chunk_beside(3.5) == 35, "a high target favours prompts"
    assert chunk_beside(3.5, None) == 30, "but not at the cost of rows without one"
    assert chunk_beside(None, target_itl_s=0.5) == 5
    assert chunk_beside(2.0, target_itl_s=0.5) == 20

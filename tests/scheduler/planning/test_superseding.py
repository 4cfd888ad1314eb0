"""A request that supersedes another one: its place in the queue, and the limits, which count the two as one."""

import asyncio

import pytest
from known_requests import BLOCK_SIZE, make_config, make_prompt

from penstock.scheduler.config import TenantLimits
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.policy import Policy
from penstock.scheduler.request import EngineFinishReason, RefusalKind, Refused


@pytest.fixture
def busy(world_type, new_request):
    """A world with one row, which is in use, and the requests ``first``, ``second`` and ``third``, which wait."""

    def busy(**config):
        world = world_type(60, make_config(max_num_seqs=1, **config))
        world.add(new_request("runs", make_prompt(20), max_tokens=14, priority=-5))
        assert world.step() == ["runs"]
        for number, name in enumerate(("first", "second", "third")):
            world.add(new_request(name, make_prompt(10 + number), max_tokens=2))
        return world

    return busy


def order(world):
    """The order in which the waiting requests begin."""
    names = []
    while world.alive():
        names += world.step()
    world.drain()
    return names


def ends(world):
    return {name for name, each in world.received.items() if each.finished is not None}


class TestPlace:
    """A request that has not begun leaves its place to the one that supersedes it."""

    def test_is_taken(self, busy, new_request):
        world = busy()
        world.add(new_request("new", make_prompt(9), max_tokens=2, supersedes="second"))
        world.check()
        assert world.received["second"].finished.reason is EngineFinishReason.SUPERSEDED
        assert world.received["new"].accepted.queue_position == 1
        assert order(world) == ["first", "new", "third"]

    def test_is_taken_again_and_again(self, busy, new_request):
        world = busy()
        world.add(new_request("new", make_prompt(9), max_tokens=2, supersedes="first"))
        world.add(new_request("newer", make_prompt(8), max_tokens=2, supersedes="new"))
        assert order(world) == ["newer", "second", "third"]

    @pytest.mark.parametrize(
        ("priority", "expected"), [(-1, ["new", "first", "third"]), (1, ["first", "third", "new"])]
    )
    def test_does_not_change_the_priority(self, busy, new_request, priority, expected):
        world = busy(policy=Policy.PRIORITY)
        world.add(new_request("new", make_prompt(9), max_tokens=2, supersedes="second", priority=priority))
        assert order(world) == expected

    @pytest.mark.parametrize("policy", [Policy.FCFS, Policy.FAIR])
    def test_is_taken_whatever_the_priority_where_it_does_not_count(self, busy, new_request, policy):
        world = busy(policy=policy)
        world.add(new_request("new", make_prompt(9), max_tokens=2, supersedes="first", priority=-1))
        assert order(world) == ["new", "second", "third"]

    @pytest.mark.parametrize(("old", "expected"), [(1, ["urgent", "new"]), (-1, ["new", "urgent"])])
    def test_is_not_ahead_of_more_urgent_requests(self, world_type, new_request, old, expected):
        """A place in the queue passes on only between requests that are equally urgent."""
        world = world_type(60, make_config(max_num_seqs=1, policy=Policy.PRIORITY))
        world.add(new_request("runs", make_prompt(20), max_tokens=14, priority=-5))
        assert world.step() == ["runs"]
        world.add(new_request("old", make_prompt(10), max_tokens=2, priority=old))
        world.add(new_request("urgent", make_prompt(11), max_tokens=2, priority=-1))
        world.add(new_request("new", make_prompt(12), max_tokens=2, priority=-1, supersedes="old"))
        assert order(world) == expected

    def test_of_a_request_that_has_begun_is_lost(self, busy, new_request):
        world = busy()
        world.add(new_request("new", make_prompt(20), max_tokens=2, supersedes="runs"))
        assert order(world) == ["first", "second", "third", "new"]
        assert world.received["new"].finished.usage.cached_tokens >= 20 - BLOCK_SIZE  # the computed part stays

    def test_of_a_request_that_has_ended_is_nobodys(self, busy, new_request):
        world = busy()
        world.add(new_request("new", make_prompt(9), max_tokens=2, supersedes="unknown"))
        assert order(world) == ["first", "second", "third", "new"]


class TestLimits:
    """The limits count a request and the one that it supersedes as one."""

    @pytest.mark.parametrize("limits", [{"max_queued_requests": 3}, {"max_queued_tokens": 33}])
    @pytest.mark.parametrize("policy", [Policy.FCFS, Policy.FAIR])
    def test_of_the_queue(self, busy, new_request, limits, policy):
        world = busy(policy=policy, **limits)
        assert world.add(new_request("more", make_prompt(9), max_tokens=2)) is None
        assert world.add(new_request("running", make_prompt(9), max_tokens=2, supersedes="runs")) is None
        assert ends(world) == set()
        assert world.add(new_request("new", make_prompt(9), max_tokens=2, supersedes="third")) is not None
        assert ends(world) == {"third"}
        world.drain()

    def test_of_the_tenant(self, busy, new_request):
        world = busy(default_tenant=TenantLimits(max_live_requests=4))
        assert world.add(new_request("more", make_prompt(9), max_tokens=2)) is None
        assert world.add(new_request("new", make_prompt(9), max_tokens=2, supersedes="runs")) is not None
        assert ends(world) == {"runs"}
        world.drain()

    def test_a_refusal_ends_nothing(self, busy, new_request):
        world = busy()
        with pytest.raises(Refused) as caught:
            world.scheduler.add_request(new_request("new", make_prompt(9), deadline=world.now, supersedes="first"))
        assert caught.value.kind is RefusalKind.DEADLINE
        assert order(world) == ["first", "second", "third"]


async def test_an_engine_with_only_a_superseding_request_is_not_idle(executor, submit):
    engine = Engine(executor)
    await engine.start()
    try:
        old = submit(engine, "old", max_tokens=4000)
        new = submit(engine, "new", max_tokens=4000, supersedes="old")
        assert old.finished.reason is EngineFinishReason.SUPERSEDED
        engine.drain()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.wait_idle(), 0.05)
        assert new.finished is None
    finally:
        await engine.stop()


async def test_an_engine_that_cannot_end_the_superseded_request_fails(executor, submit, monkeypatch):
    engine = Engine(executor)
    await engine.start()
    try:
        submit(engine, "old", max_tokens=4000)
        scheduler = engine._scheduler
        assert scheduler is not None
        monkeypatch.setattr(scheduler.kv.pool, "retain", None)
        scheduler.requests["old"].request.retain_s = 9.0
        scheduler.requests["old"].started_at = 0.0
        with pytest.raises(TypeError):
            submit(engine, "new", supersedes="old")
        assert engine.state is EngineState.FAILED
        await asyncio.wait_for(engine.wait_idle(), 5)
    finally:
        await engine.stop()

"""Requests that only compute a prompt ahead: they are charged once, and do not count as a tenant's live requests."""

import pytest

from penstock.scheduler.admission import control
from penstock.scheduler.admission.latency_predictor import UNTESTED_S
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.loop.live_requests import LiveRequestFilter
from penstock.scheduler.planning.rate_limit import Rated
from penstock.scheduler.policy import PATIENCE_S, WARM_UP_PATIENCE_S, Policy
from penstock.scheduler.request import EngineFinishReason, RefusalKind, Refused

PROMPT = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]


@pytest.fixture
def warm_up(new_request):
    def make(name, prompt=PROMPT, **fields):
        return new_request(name, prompt, is_warm_up=True, max_tokens=1, **fields)

    return make


def test_it_takes_no_place_of_a_request(world_type, new_request, warm_up):
    limits = TenantLimits(max_live_requests=1)
    world = world_type(64, SchedulerConfig(default_tenant=limits, max_num_seqs=1, max_queued_requests=1))
    for number in range(3):
        assert world.add(warm_up(str(number)))
    assert world.add(new_request("first", PROMPT))
    assert world.add(new_request("second", PROMPT)) is None
    world.check()
    world.drain()
    assert world.scheduler.tenants.warm_ups == (0, 0)


def test_it_is_not_listed_and_not_counted(world_type, new_request, warm_up):
    world = world_type(64, SchedulerConfig(explain_requests=1))
    world.add(new_request("request", PROMPT, max_tokens=3))
    world.drain()
    world.add(warm_up("ahead"))
    assert not world.scheduler.scan(LiveRequestFilter(), -1).read(10)
    world.drain()
    assert world.scheduler.counters.output_tokens == 3
    assert world.scheduler.explain("request") is not None
    assert world.scheduler.explain("ahead") is None


async def test_statistics_are_those_of_requests(executor, new_request, warm_up):
    engine = Engine(executor)
    await engine.start()
    engine.submit(warm_up("ahead", block_size=16))
    engine.submit(warm_up("behind", block_size=16, deadline=None))
    stats = engine.stats()
    assert (stats.requests, stats.waiting) == (0, 0)
    await engine.wait_idle()
    engine.submit(new_request("request", PROMPT, block_size=16))
    assert engine.stats().requests == 1
    await engine.wait_idle()
    engine.drain()
    with pytest.raises(Refused):
        engine.submit(warm_up("late", block_size=16))
    stats = engine.stats()
    assert (stats.finished, stats.refused) == (1, 0)
    await engine.stop()


def test_a_tenant_is_charged_for_what_it_has_not_paid(world_type, new_request, warm_up):
    world = world_type(64, SchedulerConfig(default_tenant=TenantLimits(tokens_per_minute=20)))

    def left():
        return 20 - world.scheduler.tenants.rate_limit("default").wait_s(Rated.TOKEN, 20, world.now) / 3

    world.scheduler.add_request(warm_up("first"))
    assert round(left()) == 10
    world.scheduler.add_request(warm_up("second", num_paid_tokens=8))
    assert round(left()) == 8
    with pytest.raises(Refused) as refused:
        world.scheduler.add_request(warm_up("third"))
    assert refused.value.kind is RefusalKind.TENANT_TOKENS
    world.scheduler.add_request(new_request("whole", PROMPT, num_paid_tokens=8))
    assert round(left()) == 6
    for name in ("first", "second"):
        world.scheduler.abort(name, EngineFinishReason.CANCELLED)


def test_a_tenant_has_half_of_what_the_others_leave(world_type, warm_up, monkeypatch):
    monkeypatch.setattr(control, "MAX_WARM_UPS", 8)
    world = world_type(64, SchedulerConfig())
    admitted = {
        tenant: sum(world.add(warm_up(f"{tenant}{n}", tenant=tenant)) is not None for n in range(9)) for tenant in "abc"
    }
    assert admitted == {"a": 4, "b": 2, "c": 1}
    assert world.scheduler.counters.refused == 0
    world.drain()


def test_requests_go_first_but_do_not_starve_it(world_type, new_request, warm_up):
    world = world_type(64, SchedulerConfig(max_num_seqs=1))
    world.now = 1e6
    world.add(new_request("running", PROMPT, max_tokens=8))
    world.step()
    for number in range(3):
        world.add(warm_up(str(number), tenant="greedy"))
    world.now += WARM_UP_PATIENCE_S - PATIENCE_S - 1
    assert world.add(new_request("request", PROMPT)).accepted.queue_position == 0
    world.now += 2
    assert world.add(new_request("late", PROMPT)).accepted.queue_position == 4
    world.drain()


def test_one_that_waits_is_ahead_of_its_tenant_and_tests_the_predictions(world_type, new_request, warm_up):
    world = world_type(400, SchedulerConfig(max_num_seqs=2, policy=Policy.FAIR))
    for number in range(2):
        world.add(new_request(str(number), PROMPT, tenant="b", max_tokens=20))
    world.step()
    world.step()
    world.now += 2 * UNTESTED_S
    planner, predictor, after = world.scheduler._planner, world.scheduler.predictor, (0.0, 1e9, 10**6, 0)
    assert predictor.needs_test
    assert planner.would_make_room("a", after)
    world.add(warm_up("ahead", tenant="a"))
    assert not predictor.needs_test
    assert not planner.would_make_room("a", after)
    assert planner.would_make_room("a", (0.0, 0.0, 0, 0)), "in front of it"
    world.drain()

"""Cases that a reading of the scheduler brought up."""

import math
from dataclasses import replace

import pytest

from penstock.scheduler import tenants
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.outlook import UNTESTED_S
from penstock.scheduler.policy import Policy
from penstock.scheduler.request import Change, Delta, FinishReason, Refused, Released


def config(**changes):
    return SchedulerConfig(**{"max_num_seqs": 5, "max_num_batched_tokens": 64} | changes)


def prompt(length, first=0):
    return [(first + position * position // 5) % 7 for position in range(length)]


def begun(world):
    assert world.schedule(), "nothing is planned"
    rows = world.scheduler._planner.rows
    return [rows.current(added.row).live.request.request_id for added in world.plans[-1].added]


def step(world):
    names = begun(world)
    world.answer()
    world.check()
    return names


def learn(world, new_request):
    for number in range(3):
        world.add(new_request(f"teacher {number}", prompt(8), max_tokens=20))
        world.drain()


def order_of(world, length):
    order: list[str] = []
    while len(order) < length:
        order += step(world)
    return order


def add_some(world, new_request, tenant, count, **fields):
    for number in range(count):
        name = f"{tenant}{len(world.received)}"
        world.add(new_request(name, prompt(8, first=number), tenant=tenant, **{"max_tokens": 6} | fields))


# Tenants


def test_what_a_tenant_was_served_alone_is_not_held_against_it(world_type, new_request, monkeypatch):
    monkeypatch.setattr(tenants, "MAX_SAVED_TOKENS", 0)
    world = world_type(100, config(policy=Policy.FAIR, max_num_seqs=1))
    add_some(world, new_request, "a", 8)
    world.drain()
    add_some(world, new_request, "b", 6)
    step(world)
    add_some(world, new_request, "a", 4)
    order = order_of(world, 4)
    assert sum(name.startswith("a") for name in order) >= 2, order
    world.drain()


def test_a_stream_that_never_ends_saves_up_no_turns(world_type, new_request, monkeypatch):
    monkeypatch.setattr(tenants, "MAX_SAVED_TOKENS", 0)
    world = world_type(100, config(policy=Policy.FAIR, max_num_seqs=2))
    world.add(new_request("b", prompt(2), tenant="b", max_tokens=40))
    step(world)
    add_some(world, new_request, "a", 6, max_tokens=4)
    for _ in range(12):
        step(world)
    add_some(world, new_request, "b", 5, max_tokens=4)
    order = order_of(world, 4)
    assert sum(name.startswith("a") for name in order) >= 2, order
    world.drain()


def test_a_tenant_that_asks_for_little_goes_first(world_type, new_request):
    """It may save up as much as a few requests need, though others wait as long."""
    world = world_type(100, config(policy=Policy.FAIR, max_num_seqs=1))
    add_some(world, new_request, "a", 10)
    for _ in range(12):
        step(world)
    add_some(world, new_request, "b", 2)
    order = order_of(world, 2)
    assert all(name.startswith("b") for name in order), order
    world.drain()


def test_turns_begin_when_the_policy_does(world_type, new_request):
    world = world_type(100, config(policy=Policy.FCFS, max_num_seqs=1))
    add_some(world, new_request, "a", 10)
    add_some(world, new_request, "b", 6)
    for _ in range(20):
        step(world)
    world.config = replace(world.config, policy=Policy.FAIR)
    world.scheduler.reconfigure(world.config)
    order = order_of(world, 4)
    assert sum(name.startswith("a") for name in order) >= 2, order
    world.drain()


def broken_text():
    raise ValueError("no text")


def test_a_request_without_a_text_leaves_nothing_behind(world_type, new_request):
    world = world_type(100, config(tenants={"a": TenantLimits(max_live_requests=1)}))
    with pytest.raises(ValueError, match="no text"):
        world.scheduler.add(new_request("broken", prompt(8), tenant="a", make_text=broken_text))
    assert not list(world.scheduler.tenants)
    assert world.scheduler.explain("broken") is None
    assert world.add(new_request("good", prompt(8), tenant="a")) is not None
    world.drain()


# Changes


def test_a_cap_that_was_lowered_is_not_asked_about_a_priority(world_type, new_request):
    world = world_type(100, config())
    named = world.add(new_request("named", prompt(8), max_tokens=20))
    default = world.add(new_request("default", prompt(8), max_tokens=20, max_tokens_is_default=True))
    step(world)
    world.config = replace(world.config, default_tenant=TenantLimits(max_tokens=5))
    world.scheduler.reconfigure(world.config)
    for name in ("named", "default"):
        assert world.scheduler.update_request(name, Change(priority=3))
    with pytest.raises(Refused):
        world.scheduler.update_request("named", Change(max_tokens=8))
    world.drain()
    assert named.finished.usage.output_tokens == default.finished.usage.output_tokens == 20


class EndlessText:
    """Holds everything back, and cannot let it go."""

    def feed(self, token_id):
        return Released(0, "")

    def finish(self):
        raise ValueError("no text")


def test_a_text_that_cannot_be_cut_ends_its_request_alone(world_type, new_request):
    world = world_type(100, config())
    world.add(new_request("other", prompt(8), max_tokens=10))
    broken = world.add(new_request("broken", prompt(8), max_tokens=10, make_text=EndlessText))
    for _ in range(4):
        step(world)
    assert world.scheduler.update_request("broken", Change(max_tokens=2))
    assert broken.finished.reason is FinishReason.INTERNAL
    world.check()
    del world.received["broken"]
    world.drain()


def test_a_limit_that_comes_with_the_last_token_changes_nothing(world_type, new_request):
    world = world_type(100, config())
    received = world.add(new_request("one", prompt(8), max_tokens=3))

    def sink(event):
        received.sink(event)
        if isinstance(event, Delta) and event.end is not None:
            world.scheduler.update_request("one", Change(max_tokens=1))

    received.request.sink = sink
    world.drain()
    assert received.finished.reason is FinishReason.LENGTH


# Plans


def test_nobody_waits_behind_a_request_that_is_late(world_type, new_request):
    """Held rows have all blocks; whoever comes first is found late; the next one has room made for it at once."""
    world = world_type(12, config(enable_prefix_caching=False))
    world.scheduler._planner.beginnings.is_late = lambda live: live.request.request_id == "late"
    world.add(new_request("held", prompt(40), max_tokens=4))
    step(world)
    world.scheduler.hold("held", True)
    late = world.add(new_request("late", prompt(20, first=1), deadline=1000.0))
    world.add(new_request("next", prompt(20, first=2)))
    assert step(world) == ["next"]
    assert late.finished.reason is FinishReason.DEADLINE
    world.drain()


def test_what_was_late_and_is_not_ends_no_step_that_it_is_in(world_type, new_request):
    """Found late by the first try of a plan, in time by the second; its choices fork when it is submitted."""
    world = world_type(8, config(policy=Policy.PRIORITY))
    answers = iter([True])
    world.scheduler._planner.beginnings.is_late = lambda live: next(answers, False)
    world.add(new_request("running", prompt(18), max_tokens=1, priority=1))
    assert begun(world) == ["running"]
    world.add(new_request("large", prompt(24, first=3), max_tokens=2))
    world.add(new_request("late", prompt(3), max_tokens=2, n=2, deadline=1000.0))
    assert world.schedule()
    world.check()
    world.drain()


def test_nobody_gives_way_to_what_waits_for_a_prefix(world_type, new_request):
    world = world_type(100, config(policy=Policy.PRIORITY, max_num_seqs=3, max_num_batched_tokens=8))
    shared = prompt(40)
    world.add(new_request("busy 1", prompt(2, first=3), priority=5, max_tokens=40))
    world.add(new_request("busy 2", prompt(2, first=4), priority=5, max_tokens=40))
    step(world)
    world.add(new_request("leader", shared, priority=4))
    step(world)
    world.add(new_request("urgent", [*shared, 1], priority=0))
    while world.scheduler._requests["urgent"].started_at is None:
        step(world)
    assert world.scheduler.counters.preemptions == 2, "before anybody knew of the prefix, and when it was computed"
    world.drain()


# Deadlines


def test_what_is_cached_is_not_counted_when_a_request_might_be_late(world_type, new_request):
    """A turn of a conversation computes little; alone and without a cache it would take its whole prompt's time."""
    world = world_type(100, config(max_num_batched_tokens=8))
    learn(world, new_request)
    shared = prompt(40)
    world.add(new_request("first", shared, max_tokens=1))
    world.drain()
    world.add(new_request("other", prompt(8, first=5), max_tokens=30))
    step(world)
    turn = world.add(new_request("turn", [*shared, 1], max_tokens=1, deadline=math.inf))
    request = world.scheduler._requests["turn"].request
    request.deadline = world.now + 2.5
    request.arrival = world.now - 20.0  # as if it had come long ago, when there was time for all of it
    world.drain()
    assert turn.finished.reason is FinishReason.LENGTH


def test_who_is_cut_by_a_deadline_that_was_too_short_tells_nothing_of_load(world_type, new_request):
    world = world_type(100, config())
    learn(world, new_request)
    for number in range(8):
        now = world.now
        received = world.add(new_request(str(number), prompt(8), max_tokens=30, deadline=now + 5, arrival=now))
        world.drain()
        assert received.finished.reason is FinishReason.DEADLINE
        assert received.token_ids[0]
    assert world.scheduler.outlook._forecast._lateness < 1.5


def test_streams_that_nobody_reads_tell_nothing_of_load(world_type, new_request):
    world = world_type(100, config())
    learn(world, new_request)
    for number in range(8):
        world.add(new_request(str(number), prompt(8), max_tokens=10))
        step(world)
        world.scheduler.hold(str(number), True)
        world.now += 1000.0
        world.scheduler.hold(str(number), False)
        world.drain()
    assert world.scheduler.outlook._forecast._lateness < 1.5


def test_a_worker_that_died_tells_nothing_of_load(world_type, new_request):
    world = world_type(100, config())
    learn(world, new_request)
    for number in range(8):
        world.add(new_request(str(number), prompt(8), max_tokens=10))
    step(world)
    world.recover(blames_step=False)
    world.now += 1000.0
    world.drain()
    assert world.scheduler.outlook._forecast._lateness < 1.5


def test_a_bad_start_is_found_out(world_type, new_request):
    """The first prompt took very long. Beside a stream that only decodes nothing would ever tell that others do not."""
    world = world_type(100, config())
    world.add(new_request("long", prompt(2), max_tokens=40))
    world.step_us = 1_000_000_000
    step(world)
    world.step_us = 1_000_000
    for _ in range(8):
        step(world)

    def add(name):
        return world.add(new_request(name, prompt(8), deadline=world.now + 20, arrival=world.now))

    assert add("refused") is None
    world.now += UNTESTED_S
    taken = add("taken")
    assert taken is not None
    assert add("too many") is None
    world.drain()
    assert taken.finished.reason is FinishReason.LENGTH


def test_bad_times_are_forgotten(world_type, new_request):
    """Beside one long stream, so that somebody is always there."""
    world = world_type(100, config())
    learn(world, new_request)
    for _ in range(8):
        world.scheduler.outlook._forecast.learn_total(1.0, math.inf)
    world.add(new_request("long", prompt(2), max_tokens=40))
    step(world)
    fields = {"max_tokens": 4}
    assert world.add(new_request("refused", prompt(8), deadline=world.now + 9, **fields)) is None
    world.now += UNTESTED_S
    assert world.add(new_request("taken", prompt(8), deadline=world.now + 9, **fields)) is not None
    world.drain()

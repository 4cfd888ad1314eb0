"""Who goes first, who gives way and who may overtake, under each policy."""

from dataclasses import replace

import pytest

from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.planning.prefill_adder import MAX_OVERTAKEN
from penstock.scheduler.policy import PATIENCE_S, Policy
from penstock.scheduler.request import Change, EngineFinishReason, RefusalKind, Refused


def config(**changes):
    return SchedulerConfig(**{"max_num_seqs": 5, "max_num_batched_tokens": 64} | changes)


def prompt(length, first=0):
    return [(first + position * position // 5) % 7 for position in range(length)]


def begun(world):
    """The requests that begin in the next plan."""
    assert world.schedule(), "nothing is planned"
    rows = world.scheduler._planner.rows
    return [rows.current(added.row).live.request.request_id for added in world.plans[-1].added]


def step(world):
    """A plan and its answer; returns who begins."""
    names = begun(world)
    world.answer()
    world.check()
    return names


def learn(world, new_request):
    """Has the scheduler find out that a step takes a second, whatever is in it."""
    for number in range(3):
        world.add(new_request(f"teacher {number}", prompt(8), max_tokens=20))
        world.drain()


# Overtaking -----------------------------------------------------------------------------------------------------------


def test_a_request_that_does_not_fit_is_overtaken_but_does_not_starve(world_type, new_request):
    world = world_type(12, config(enable_prefix_caching=False))  # of four tokens
    world.add(new_request("first", prompt(24), max_tokens=8))
    assert step(world) == ["first"]
    world.add(new_request("large", prompt(36, first=1), max_tokens=8))
    small = 0
    while world.received["large"].finished is None and small < 10 * MAX_OVERTAKEN:
        world.add(new_request(f"small {small}", prompt(2, first=small), max_tokens=2))
        small += 1
        names = step(world)
        if "large" in names:
            break
    overtook = [name for name, one in world.received.items() if name.startswith("small") and one.finished is not None]
    assert overtook, "nobody could pass the request that did not fit"
    assert world.received["large"].finished is None, "it runs"
    assert small <= 2 * MAX_OVERTAKEN, "it starves"
    world.drain()


def test_a_request_that_does_not_fit_is_passed_no_more_often_than_allowed(world_type, new_request):
    world = world_type(12, config(enable_prefix_caching=False))
    world.add(new_request("first", prompt(24), max_tokens=20))
    step(world)
    world.add(new_request("large", prompt(36, first=1), max_tokens=8))
    sequence = world.scheduler._requests["large"].sequences[0]
    step(world)
    sequence.num_overtaken = MAX_OVERTAKEN  # as if so many had passed
    world.add(new_request("small", prompt(2), max_tokens=2))
    assert step(world) == []
    assert world.received["small"].token_ids == {}
    world.drain()


# Preemption -----------------------------------------------------------------------------------------------------------


def test_preemption_takes_what_has_the_least_to_compute_again(world_type, new_request):
    """Of two rows that came later, the one with the shorter history gives way, though it is not the last."""
    world = world_type(11, config(enable_prefix_caching=False))
    world.add(new_request("first", prompt(11), max_tokens=30))
    world.add(new_request("short", prompt(5, first=1), max_tokens=14))
    world.add(new_request("long", prompt(22, first=2), max_tokens=14))
    while not world.scheduler.counters.preemptions:
        step(world)
    assert world.scheduler._requests["short"].timings.preemptions == 1
    assert world.scheduler._requests["long"].timings.preemptions == 0
    world.drain()


def test_blocks_that_others_hold_are_nothing_to_compute_again(world_type, new_request):
    world = world_type(20, config())
    shared = prompt(24)
    world.add(new_request("first", shared, max_tokens=20))
    step(world)
    step(world)
    world.add(new_request("own", prompt(13, first=3), max_tokens=20))
    world.add(new_request("sharing", [*shared, 3, 1], max_tokens=16))
    while not world.scheduler.counters.preemptions:
        step(world)
    assert world.scheduler._requests["sharing"].timings.preemptions == 1
    world.drain()


def test_a_higher_priority_takes_a_row(world_type, new_request):
    world = world_type(50, config(policy=Policy.PRIORITY, max_num_seqs=2))
    world.add(new_request("low", prompt(8), max_tokens=20, priority=5))
    world.add(new_request("middle", prompt(8, first=1), max_tokens=20, priority=1))
    step(world)
    world.add(new_request("equal", prompt(8, first=2), max_tokens=20, priority=5))
    assert step(world) == []
    world.add(new_request("high", prompt(8, first=3), max_tokens=20, priority=0))
    assert step(world) == ["high"]
    assert world.scheduler._requests["low"].timings.preemptions == 1
    world.drain()


def test_a_higher_priority_takes_blocks(world_type, new_request):
    world = world_type(12, config(policy=Policy.PRIORITY, enable_prefix_caching=False))
    world.add(new_request("low", prompt(30), max_tokens=10, priority=5))
    step(world)
    world.add(new_request("high", prompt(30, first=3), max_tokens=10, priority=0))
    assert [name for _ in range(3) for name in step(world)] == ["high"]
    world.drain()


def test_a_higher_priority_takes_only_the_blocks_that_it_cannot_share(world_type, new_request):
    """Nine of its ten are another's, which stays: the one that is missing is taken from a row that has six."""
    world = world_type(16, config(policy=Policy.PRIORITY))
    shared = prompt(36)
    world.add(new_request("first", shared, priority=0, max_tokens=8))
    world.add(new_request("low", prompt(21, first=3), priority=5, max_tokens=4))
    step(world)
    step(world)
    world.add(new_request("high", [*shared, 1, 2, 3, 4], priority=0, max_tokens=1))
    assert [*step(world), *step(world)] == ["high"]
    assert world.scheduler._requests["low"].timings.preemptions == 1
    world.drain()


def test_blocks_that_only_lower_priorities_share_can_be_taken_from_them(world_type, new_request):
    world = world_type(16, config(policy=Policy.PRIORITY))
    shared = prompt(36)
    world.add(new_request("low 1", [*shared, 1], priority=5, max_tokens=6))
    step(world)
    world.add(new_request("low 2", [*shared, 2], priority=5, max_tokens=6))
    step(world)
    world.add(new_request("high", prompt(40, first=3), priority=0, max_tokens=1))
    assert [name for _ in range(3) for name in step(world)] == ["high"]
    world.drain()


def test_a_higher_priority_waits_for_no_prefix_that_a_lower_one_computes(world_type, new_request):
    """Others between the two take the whole budget."""
    world = world_type(100, config(policy=Policy.PRIORITY, max_num_batched_tokens=9))
    shared = prompt(30)
    world.add(new_request("leader", shared, priority=5))
    step(world)
    world.add(new_request("urgent", [*shared, 1], priority=0))
    world.add(new_request("second", [*shared, 2], priority=0))
    begun_at: dict[str, int] = {}
    for number in range(8):
        for part in range(2):
            world.add(new_request(f"{number}.{part}", prompt(9, first=number + 3), priority=1, max_tokens=1))
        begun_at |= dict.fromkeys(step(world), number)
    assert begun_at["urgent"] <= 1
    assert begun_at["second"] > begun_at["urgent"], "the prefix is computed twice"
    world.drain()


def test_nobody_gives_way_to_what_waits_for_a_prefix(world_type, new_request):
    world = world_type(100, config(policy=Policy.PRIORITY, max_num_seqs=3, max_num_batched_tokens=8))
    shared = prompt(40)
    world.add(new_request("busy 1", prompt(2, first=3), priority=5, max_tokens=40))
    world.add(new_request("busy 2", prompt(2, first=4), priority=5, max_tokens=40))
    step(world)
    world.add(new_request("leader", shared, priority=0))
    step(world)
    world.add(new_request("urgent", [*shared, 1], priority=0))
    while world.scheduler._requests["urgent"].started_at is None:
        step(world)
    assert world.scheduler.counters.preemptions == 2, "before anybody knew of the prefix, and when it was computed"
    world.drain()


# Deadlines ------------------------------------------------------------------------------------------------------------


def test_the_least_slack_goes_first(world_type, new_request):
    world = world_type(100, config(policy=Policy.DEADLINE, max_num_seqs=1))
    world.add(new_request("none", prompt(4), max_tokens=2))
    world.add(new_request("late", prompt(4, first=1), max_tokens=2, deadline=PATIENCE_S / 2))
    world.add(new_request("soon", prompt(4, first=2), max_tokens=2, deadline=PATIENCE_S / 3))
    order: list[str] = []
    while world.alive():
        order += step(world)
    assert order == ["soon", "late", "none"]


def test_what_can_no_longer_meet_its_deadline_costs_no_step(world_type, new_request):
    world = world_type(100, config(policy=Policy.DEADLINE, max_num_seqs=1))
    learn(world, new_request)
    world.add(new_request("running", prompt(4), max_tokens=10))
    step(world)
    hopeless = world.add(new_request("hopeless", prompt(4, first=1), max_tokens=10, deadline=world.now + 28))
    # With less slack, it goes first: then there is no time for the other any more.
    urgent = world.add(new_request("urgent", prompt(4, first=2), max_tokens=10, deadline=world.now + 26))
    prefilled = world.scheduler.counters.prefill_tokens
    world.drain()
    assert urgent.finished.reason is EngineFinishReason.LENGTH
    assert hopeless.finished.reason is EngineFinishReason.DEADLINE
    assert hopeless.finished.usage.output_tokens == 0
    assert world.scheduler.counters.prefill_tokens == prefilled + 4


def test_what_is_late_ends_once_where_a_plan_is_made_anew(world_type, new_request):
    """The first try finds it late and is empty; room is made; the second try finds it late again."""
    world = world_type(8, config(policy=Policy.PRIORITY))
    world.scheduler._planner.prefill_adder._is_late = lambda live: live.request.request_id == "late"
    world.add(new_request("running", prompt(18), max_tokens=1, priority=1))
    assert begun(world) == ["running"]
    world.add(new_request("large", prompt(24, first=3), max_tokens=2))
    late = world.add(new_request("late", prompt(3), max_tokens=2, deadline=1000.0))
    assert begun(world) == ["large"]
    assert late.finished.reason is EngineFinishReason.DEADLINE
    world.drain()


def test_nobody_waits_behind_a_request_that_is_late(world_type, new_request):
    """Held rows have all blocks; whoever comes first is found late; the next one has room made for it at once."""
    world = world_type(12, config(enable_prefix_caching=False))
    world.scheduler._planner.prefill_adder._is_late = lambda live: live.request.request_id == "late"
    world.add(new_request("held", prompt(40), max_tokens=4))
    step(world)
    world.scheduler.hold("held", True)
    late = world.add(new_request("late", prompt(20, first=1), deadline=1000.0))
    world.add(new_request("next", prompt(20, first=2)))
    assert step(world) == ["next"]
    assert late.finished.reason is EngineFinishReason.DEADLINE
    world.drain()


def test_what_was_late_and_is_not_ends_no_step_that_it_is_in(world_type, new_request):
    """Found late by the first try of a plan, in time by the second; its choices fork when it is submitted."""
    world = world_type(8, config(policy=Policy.PRIORITY))
    answers = iter([True])
    world.scheduler._planner.prefill_adder._is_late = lambda live: next(answers, False)
    world.add(new_request("running", prompt(18), max_tokens=1, priority=1))
    assert begun(world) == ["running"]
    world.add(new_request("large", prompt(24, first=3), max_tokens=2))
    world.add(new_request("late", prompt(3), max_tokens=2, n=2, deadline=1000.0))
    assert world.schedule()
    world.check()
    world.drain()


def test_what_cannot_meet_its_deadline_is_refused_with_a_hint(world_type, new_request):
    world = world_type(100, config(max_num_seqs=1))
    learn(world, new_request)
    for number in range(4):
        world.add(new_request(str(number), prompt(8, first=number), max_tokens=20))
    with pytest.raises(Refused) as refused:
        world.scheduler.add_request(new_request("late", prompt(8), max_tokens=2, deadline=world.now + 40))
    assert refused.value.kind is RefusalKind.OVERLOADED
    assert 30_000 < (refused.value.retry_after_ms or 0) < 80_000
    world.drain()


def test_a_limit_that_no_deadline_allows_is_no_reason_to_refuse(world_type, new_request):
    """Its caller gets what there is at the deadline."""
    world = world_type(100, config())
    learn(world, new_request)
    assert world.add(new_request("long", prompt(8), max_tokens=30, deadline=world.now + 9)) is not None
    world.drain()


# Streams that nobody reads --------------------------------------------------------------------------------------------


def test_a_held_request_is_in_no_plan_and_goes_on_when_it_is_released(world_type, new_request):
    world = world_type(100, config())
    for name in ("held", "other"):
        world.add(new_request(name, prompt(8, first=len(name)), max_tokens=12))
    step(world)
    world.scheduler.hold("held", True)
    while world.received["other"].finished is None:
        step(world)
    assert len(world.received["held"].token_ids[0]) == 1
    assert not world.schedule()
    world.scheduler.hold("held", False)
    world.drain()


def test_a_held_request_gives_way_to_whoever_waits(world_type, new_request):
    world = world_type(12, config(enable_prefix_caching=False, max_num_seqs=2))
    world.add(new_request("held", prompt(30), max_tokens=10))
    step(world)
    world.scheduler.hold("held", True)
    world.add(new_request("waiting", prompt(30, first=1), max_tokens=4))
    assert step(world) == ["waiting"]
    while world.received["waiting"].finished is None:
        step(world)
    assert world.scheduler._requests["held"].timings.preemptions == 1
    world.scheduler.hold("held", False)
    world.drain()


# Changes --------------------------------------------------------------------------------------------------------------


def test_a_lower_limit_ends_a_request_at_once(world_type, new_request):
    world = world_type(100, config())
    received = world.add(new_request("one", prompt(8), max_tokens=30))
    for _ in range(6):
        step(world)
    received.limits[0] = 6
    assert world.scheduler.update_request("one", Change(max_tokens=3))
    assert received.finished.reason is EngineFinishReason.LENGTH
    assert received.finished.usage.output_tokens == 6
    assert not world.scheduler.update_request("one", Change(max_tokens=3))
    world.drain()


def test_a_higher_limit_lets_a_request_go_on(world_type, new_request):
    world = world_type(100, config())
    received = world.add(new_request("one", prompt(8), max_tokens=4))
    step(world)
    assert world.scheduler.update_request("one", Change(max_tokens=20))
    received.limits[0] = 20
    world.drain()
    assert received.finished.usage.output_tokens == 20


def test_a_limit_that_never_fits_is_refused_and_changes_nothing(world_type, new_request):
    world = world_type(5, config())
    received = world.add(new_request("one", prompt(8), max_tokens=4))
    with pytest.raises(Refused) as refused:
        world.scheduler.update_request("one", Change(max_tokens=30))
    assert refused.value.kind is RefusalKind.TOO_LARGE
    world.drain()
    assert received.finished.usage.output_tokens == 4


def test_a_cap_that_was_lowered_is_not_asked_about_a_priority(world_type, new_request):
    world = world_type(100, config())
    named = world.add(new_request("named", prompt(8), max_tokens=20))
    default = world.add(new_request("default", prompt(8), max_tokens=20, max_tokens_is_default=True))
    step(world)
    forked = world.add(new_request("forked", prompt(8), max_tokens=20, max_tokens_is_default=True, n=2))
    world.config = replace(world.config, default_tenant=TenantLimits(max_tokens=5))
    world.scheduler.reconfigure(world.config)
    for name in ("named", "default"):
        assert world.scheduler.update_request(name, Change(priority=3))
    with pytest.raises(Refused):
        world.scheduler.update_request("named", Change(max_tokens=8))
    world.drain()
    assert named.finished.usage.output_tokens == default.finished.usage.output_tokens == 20
    assert forked.finished.usage.output_tokens == 40


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_limits_and_policy_change_while_requests_run(world_type, new_request, max_num_seqs):
    world = world_type(60, config())
    for number in range(8):
        sampling = SamplingParams(seed=number, temperature=1.0)
        tenant = "ab"[number % 2]
        world.add(new_request(str(number), prompt(8, first=number), max_tokens=12, sampling=sampling, tenant=tenant))
    for policy in Policy:
        world.config = replace(world.config, policy=policy, max_num_seqs=max_num_seqs, target_itl_s=0.05)
        world.scheduler.reconfigure(world.config)
        step(world)
        assert world.scheduler.num_running <= max_num_seqs
    world.drain()
    assert {one.finished.reason for one in world.received.values()} == {EngineFinishReason.LENGTH}


def test_more_rows_than_the_worker_has_are_refused_by_name(world_type):
    world = world_type(60, config())
    with pytest.raises(ValueError, match="max_num_seqs is 9; the worker was started with 5"):
        world.scheduler.reconfigure(replace(world.config, max_num_seqs=9))

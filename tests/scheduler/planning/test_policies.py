"""Who goes first, who gives way and who may overtake, under each policy."""

from dataclasses import replace

import pytest
from known_requests import make_config, make_prompt

from penstock.scheduler.config import TenantLimits
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.planning.prefill_adder import MAX_OVERTAKEN
from penstock.scheduler.policy import PATIENCE_S, Policy
from penstock.scheduler.request import Change, EngineFinishReason, RefusalKind, Refused

# Overtaking -----------------------------------------------------------------------------------------------------------


def test_a_request_that_does_not_fit_is_overtaken_but_does_not_starve(world_type, new_request):
    world = world_type(12, make_config(enable_prefix_caching=False))  # of four tokens
    world.add(new_request("first", make_prompt(24), max_tokens=8))
    assert world.step() == ["first"]
    world.add(new_request("large", make_prompt(36, first=1), max_tokens=8))
    small = 0
    while world.received["large"].finished is None and small < 10 * MAX_OVERTAKEN:
        world.add(new_request(f"small {small}", make_prompt(2, first=small), max_tokens=2))
        small += 1
        names = world.step()
        if "large" in names:
            break
    overtook = [name for name, one in world.received.items() if name.startswith("small") and one.finished is not None]
    assert overtook, "nobody could pass the request that did not fit"
    assert world.received["large"].finished is None, "it runs"
    assert small <= 2 * MAX_OVERTAKEN, "it starves"
    world.drain()


def test_a_request_that_does_not_fit_is_passed_no_more_often_than_allowed(world_type, new_request):
    world = world_type(12, make_config(enable_prefix_caching=False))
    world.add(new_request("first", make_prompt(24), max_tokens=20))
    world.step()
    world.add(new_request("large", make_prompt(36, first=1), max_tokens=8))
    sequence = world.scheduler.requests["large"].sequences[0]
    world.step()
    sequence.num_overtaken = MAX_OVERTAKEN  # as if so many had passed
    world.add(new_request("small", make_prompt(2), max_tokens=2))
    assert world.step() == []
    assert world.received["small"].token_ids == {}
    world.drain()


# Preemption -----------------------------------------------------------------------------------------------------------


def test_preemption_takes_what_has_the_least_to_compute_again(world_type, new_request):
    """Of two rows that came later, the one with the shorter history gives way, though it is not the last."""
    world = world_type(11, make_config(enable_prefix_caching=False))
    world.add(new_request("first", make_prompt(11), max_tokens=30))
    world.add(new_request("short", make_prompt(5, first=1), max_tokens=14))
    world.add(new_request("long", make_prompt(22, first=2), max_tokens=14))
    while not world.scheduler.counters.preemptions:
        world.step()
    assert world.scheduler.requests["short"].timings.preemptions == 1
    assert world.scheduler.requests["long"].timings.preemptions == 0
    world.drain()


def test_blocks_that_others_hold_are_nothing_to_compute_again(world_type, new_request):
    world = world_type(20, make_config())
    shared = make_prompt(24)
    world.add(new_request("first", shared, max_tokens=20))
    world.step()
    world.step()
    world.add(new_request("own", make_prompt(13, first=3), max_tokens=20))
    world.add(new_request("sharing", [*shared, 3, 1], max_tokens=16))
    while not world.scheduler.counters.preemptions:
        world.step()
    assert world.scheduler.requests["sharing"].timings.preemptions == 1
    world.drain()


def test_a_higher_priority_takes_a_row(world_type, new_request):
    world = world_type(50, make_config(policy=Policy.PRIORITY, max_num_seqs=2))
    world.add(new_request("low", make_prompt(8), max_tokens=20, priority=5))
    world.add(new_request("middle", make_prompt(8, first=1), max_tokens=20, priority=1))
    world.step()
    world.add(new_request("equal", make_prompt(8, first=2), max_tokens=20, priority=5))
    assert world.step() == []
    world.add(new_request("high", make_prompt(8, first=3), max_tokens=20, priority=0))
    assert world.step() == ["high"]
    assert world.scheduler.requests["low"].timings.preemptions == 1
    world.drain()


def test_a_higher_priority_takes_blocks(world_type, new_request):
    world = world_type(12, make_config(policy=Policy.PRIORITY, enable_prefix_caching=False))
    world.add(new_request("low", make_prompt(30), max_tokens=10, priority=5))
    world.step()
    world.add(new_request("high", make_prompt(30, first=3), max_tokens=10, priority=0))
    assert [name for _ in range(3) for name in world.step()] == ["high"]
    world.drain()


def test_a_higher_priority_takes_only_the_blocks_that_it_cannot_share(world_type, new_request):
    """Nine of its ten are another's, which stays: the one that is missing is taken from a row that has six."""
    world = world_type(16, make_config(policy=Policy.PRIORITY))
    shared = make_prompt(36)
    world.add(new_request("first", shared, priority=0, max_tokens=8))
    world.add(new_request("low", make_prompt(21, first=3), priority=5, max_tokens=4))
    world.step()
    world.step()
    world.add(new_request("high", [*shared, 1, 2, 3, 4], priority=0, max_tokens=1))
    assert [*world.step(), *world.step()] == ["high"]
    assert world.scheduler.requests["low"].timings.preemptions == 1
    world.drain()


def test_blocks_that_only_lower_priorities_share_can_be_taken_from_them(world_type, new_request):
    world = world_type(16, make_config(policy=Policy.PRIORITY))
    shared = make_prompt(36)
    world.add(new_request("low 1", [*shared, 1], priority=5, max_tokens=6))
    world.step()
    world.add(new_request("low 2", [*shared, 2], priority=5, max_tokens=6))
    world.step()
    world.add(new_request("high", make_prompt(40, first=3), priority=0, max_tokens=1))
    assert [name for _ in range(3) for name in world.step()] == ["high"]
    world.drain()


def test_a_higher_priority_waits_for_no_prefix_that_a_lower_one_computes(world_type, new_request):
    """Others between the two take the whole budget."""
    world = world_type(100, make_config(policy=Policy.PRIORITY, max_num_batched_tokens=9))
    shared = make_prompt(30)
    world.add(new_request("leader", shared, priority=5))
    world.step()
    world.add(new_request("urgent", [*shared, 1], priority=0))
    world.add(new_request("second", [*shared, 2], priority=0))
    begun_at: dict[str, int] = {}
    for number in range(8):
        for part in range(2):
            world.add(new_request(f"{number}.{part}", make_prompt(9, first=number + 3), priority=1, max_tokens=1))
        begun_at |= dict.fromkeys(world.step(), number)
    assert begun_at["urgent"] <= 1
    assert begun_at["second"] > begun_at["urgent"], "the prefix is computed twice"
    world.drain()


def test_nobody_gives_way_to_what_waits_for_a_prefix(world_type, new_request):
    world = world_type(100, make_config(policy=Policy.PRIORITY, max_num_seqs=3, max_num_batched_tokens=8))
    shared = make_prompt(40)
    world.add(new_request("busy 1", make_prompt(2, first=3), priority=5, max_tokens=40))
    world.add(new_request("busy 2", make_prompt(2, first=4), priority=5, max_tokens=40))
    world.step()
    world.add(new_request("leader", shared, priority=0))
    world.step()
    world.add(new_request("urgent", [*shared, 1], priority=0))
    while world.scheduler.requests["urgent"].started_at is None:
        world.step()
    assert world.scheduler.counters.preemptions == 2, "before anybody knew of the prefix, and when it was computed"
    world.drain()


# Deadlines ------------------------------------------------------------------------------------------------------------


def test_the_least_slack_goes_first(world_type, new_request):
    world = world_type(100, make_config(policy=Policy.DEADLINE, max_num_seqs=1))
    world.add(new_request("none", make_prompt(4), max_tokens=2))
    world.add(new_request("late", make_prompt(4, first=1), max_tokens=2, deadline=PATIENCE_S / 2))
    world.add(new_request("soon", make_prompt(4, first=2), max_tokens=2, deadline=PATIENCE_S / 3))
    order: list[str] = []
    while world.alive():
        order += world.step()
    assert order == ["soon", "late", "none"]


def test_what_can_no_longer_meet_its_deadline_costs_no_step(world_type, new_request):
    world = world_type(100, make_config(policy=Policy.DEADLINE, max_num_seqs=1))
    world.learn_step_time()
    world.add(new_request("running", make_prompt(4), max_tokens=10))
    world.step()
    hopeless = world.add(new_request("hopeless", make_prompt(4, first=1), max_tokens=10, deadline=world.now + 28))
    # With less slack, it goes first: then there is no time for the other any more.
    urgent = world.add(new_request("urgent", make_prompt(4, first=2), max_tokens=10, deadline=world.now + 26))
    prefilled = world.scheduler.counters.prefill_tokens
    world.drain()
    assert urgent.finished.reason is EngineFinishReason.LENGTH
    assert hopeless.finished.reason is EngineFinishReason.DEADLINE
    assert hopeless.finished.usage.output_tokens == 0
    assert world.scheduler.counters.prefill_tokens == prefilled + 4


def test_what_is_late_ends_once_where_a_plan_is_made_anew(world_type, new_request):
    """The first try finds it late and is empty; room is made; the second try finds it late again."""
    world = world_type(8, make_config(policy=Policy.PRIORITY))
    world.scheduler._planner.prefill_adder._is_late = lambda live: live.request.request_id == "late"
    world.add(new_request("running", make_prompt(18), max_tokens=1, priority=1))
    assert world.begin() == ["running"]
    world.add(new_request("large", make_prompt(24, first=3), max_tokens=2))
    late = world.add(new_request("late", make_prompt(3), max_tokens=2, deadline=1000.0))
    assert world.begin() == ["large"]
    assert late.finished.reason is EngineFinishReason.DEADLINE
    world.drain()


def test_nobody_waits_behind_a_request_that_is_late(world_type, new_request):
    """Held rows have all blocks; whoever comes first is found late; the next one has room made for it at once."""
    world = world_type(12, make_config(enable_prefix_caching=False))
    world.scheduler._planner.prefill_adder._is_late = lambda live: live.request.request_id == "late"
    world.add(new_request("held", make_prompt(40), max_tokens=4))
    world.step()
    world.scheduler.hold("held", True)
    late = world.add(new_request("late", make_prompt(20, first=1), deadline=1000.0))
    world.add(new_request("next", make_prompt(20, first=2)))
    assert world.step() == ["next"]
    assert late.finished.reason is EngineFinishReason.DEADLINE
    world.drain()


def test_what_was_late_and_is_not_ends_no_step_that_it_is_in(world_type, new_request):
    """Found late by the first try of a plan, in time by the second; its choices fork when it is submitted."""
    world = world_type(8, make_config(policy=Policy.PRIORITY))
    answers = iter([True])
    world.scheduler._planner.prefill_adder._is_late = lambda live: next(answers, False)
    world.add(new_request("running", make_prompt(18), max_tokens=1, priority=1))
    assert world.begin() == ["running"]
    world.add(new_request("large", make_prompt(24, first=3), max_tokens=2))
    world.add(new_request("late", make_prompt(3), max_tokens=2, n=2, deadline=1000.0))
    assert world.schedule()
    world.check()
    world.drain()


def test_what_cannot_meet_its_deadline_is_refused_with_a_hint(world_type, new_request):
    world = world_type(100, make_config(max_num_seqs=1))
    world.learn_step_time()
    for number in range(4):
        world.add(new_request(str(number), make_prompt(8, first=number), max_tokens=20))
    with pytest.raises(Refused) as refused:
        world.scheduler.add_request(new_request("late", make_prompt(8), max_tokens=2, deadline=world.now + 40))
    assert refused.value.kind is RefusalKind.OVERLOADED
    assert 30_000 < (refused.value.retry_after_ms or 0) < 80_000
    world.drain()


def test_a_limit_that_no_deadline_allows_is_no_reason_to_refuse(world_type, new_request):
    """Its caller gets what there is at the deadline."""
    world = world_type(100, make_config())
    world.learn_step_time()
    assert world.add(new_request("long", make_prompt(8), max_tokens=30, deadline=world.now + 9)) is not None
    world.drain()


# Streams that nobody reads --------------------------------------------------------------------------------------------


def test_a_held_request_is_in_no_plan_and_goes_on_when_it_is_released(world_type, new_request):
    world = world_type(100, make_config())
    for name in ("held", "other"):
        world.add(new_request(name, make_prompt(8, first=len(name)), max_tokens=12))
    world.step()
    world.scheduler.hold("held", True)
    while world.received["other"].finished is None:
        world.step()
    assert len(world.received["held"].token_ids[0]) == 1
    assert not world.schedule()
    world.scheduler.hold("held", False)
    world.drain()


def test_a_held_request_gives_way_to_a_waiting_one(world_type, new_request):
    world = world_type(12, make_config(enable_prefix_caching=False, max_num_seqs=2))
    world.add(new_request("held", make_prompt(30), max_tokens=10))
    world.step()
    world.scheduler.hold("held", True)
    world.add(new_request("waiting", make_prompt(30, first=1), max_tokens=4))
    assert world.step() == ["waiting"]
    while world.received["waiting"].finished is None:
        world.step()
    assert world.scheduler.requests["held"].timings.preemptions == 1
    world.scheduler.hold("held", False)
    world.drain()


# Changes --------------------------------------------------------------------------------------------------------------


def test_a_lower_limit_ends_a_request_at_once(world_type, new_request):
    world = world_type(100, make_config())
    received = world.add(new_request("one", make_prompt(8), max_tokens=30))
    for _ in range(6):
        world.step()
    received.limits[0] = 6
    assert world.scheduler.update_request("one", Change(max_tokens=3))
    assert received.finished.reason is EngineFinishReason.LENGTH
    assert received.finished.usage.output_tokens == 6
    assert not world.scheduler.update_request("one", Change(max_tokens=3))
    world.drain()


def test_a_higher_limit_lets_a_request_go_on(world_type, new_request):
    world = world_type(100, make_config())
    received = world.add(new_request("one", make_prompt(8), max_tokens=4))
    world.step()
    assert world.scheduler.update_request("one", Change(max_tokens=20))
    received.limits[0] = 20
    world.drain()
    assert received.finished.usage.output_tokens == 20


def test_a_limit_that_never_fits_is_refused_and_changes_nothing(world_type, new_request):
    world = world_type(5, make_config())
    received = world.add(new_request("one", make_prompt(8), max_tokens=4))
    with pytest.raises(Refused) as refused:
        world.scheduler.update_request("one", Change(max_tokens=30))
    assert refused.value.kind is RefusalKind.TOO_LARGE
    world.drain()
    assert received.finished.usage.output_tokens == 4


def test_a_lowered_cap_does_not_block_a_priority_change(world_type, new_request):
    world = world_type(100, make_config())
    named = world.add(new_request("named", make_prompt(8), max_tokens=20))
    default = world.add(new_request("default", make_prompt(8), max_tokens=20, max_tokens_is_default=True))
    world.step()
    forked = world.add(new_request("forked", make_prompt(8), max_tokens=20, max_tokens_is_default=True, n=2))
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
    world = world_type(60, make_config())
    for number in range(8):
        sampling = SamplingParams(seed=number, temperature=1.0)
        tenant = "ab"[number % 2]
        world.add(
            new_request(str(number), make_prompt(8, first=number), max_tokens=12, sampling=sampling, tenant=tenant)
        )
    for policy in Policy:
        world.config = replace(world.config, policy=policy, max_num_seqs=max_num_seqs, target_itl_s=0.05)
        world.scheduler.reconfigure(world.config)
        world.step()
        assert len(world.scheduler.running) <= max_num_seqs
    world.drain()
    assert {one.finished.reason for one in world.received.values()} == {EngineFinishReason.LENGTH}


def test_more_rows_than_the_worker_has_are_refused_by_name(world_type):
    world = world_type(60, make_config())
    with pytest.raises(ValueError, match="max_num_seqs is 9; the worker was started with 5"):
        world.scheduler.reconfigure(replace(world.config, max_num_seqs=9))

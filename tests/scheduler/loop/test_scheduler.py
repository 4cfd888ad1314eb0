"""What the scheduler decides, plan by plan."""

import pytest

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import Chunk, Decode, SamplingParams
from penstock.scheduler.policy import Policy
from penstock.scheduler.request import (
    EngineFinishReason,
    RefusalKind,
    Refused,
    StopMatch,
)


def config(**changes):
    return SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 16} | changes)


def prompt(length, first=0):
    return [(first + position) % 7 for position in range(length)]


@pytest.fixture
def world(world_type):
    return world_type(64, config())


def test_a_prompt_is_computed_in_chunks_beside_rows_that_decode(world, new_request):
    world.add(new_request("first", prompt(6)))
    plan = world.next_plan()
    assert plan.chunks == [Chunk(plan.added[0].row, 0, 6)]
    world.add(new_request("second", prompt(34, first=3)))
    plans = []
    for _ in range(3):
        plans.append(world.next_plan())
        world.answer()
    row = plans[0].added[0].row
    # One token of the budget of 16 is the first row's in every step.
    assert [plan.decodes for plan in plans] == [[Decode(0, 1)]] * 3
    assert [plan.chunks for plan in plans] == [[Chunk(row, 0, 15)], [Chunk(row, 15, 30)], [Chunk(row, 30, 34)]]
    world.drain()


def test_a_row_is_never_continued_past_its_last_token(world, new_request):
    received = world.add(new_request("one", prompt(5), max_tokens=3))
    world.next_plan()
    world.next_plan()
    world.answer()
    world.next_plan()
    world.answer()
    # The third and last token is in flight: nothing is left to plan.
    assert not world.schedule()
    world.answer()
    assert received.finished is not None
    assert world.scheduler.counters.decode_rows == 2
    received.check_end()


def test_nothing_follows_a_stop_though_a_step_was_in_flight(world, new_request):
    request = new_request("one", prompt(5), max_tokens=20, sampling=SamplingParams(stop_token_ids=tuple(range(7))))
    received = world.add(request)
    world.next_plan()
    assert world.next_plan().decodes  # submitted before anybody knows that the first token stops
    world.answer()
    assert received.finished is not None
    assert received.finished.usage.output_tokens == 1
    assert received.ends[0].reason is EngineFinishReason.STOP
    assert len(received.token_ids[0]) == 1
    assert world.scheduler.kv.usage == 0.0
    world.answer()  # its result is discarded
    assert not world.schedule()
    world.drain()


def test_stop_tokens_do_not_stop_before_min_tokens(world, new_request):
    sampling = SamplingParams(stop_token_ids=(1, 2, 3), min_tokens=6)
    received = world.add(new_request("one", prompt(5), max_tokens=9, sampling=sampling))
    world.drain()
    assert received.finished.usage.output_tokens >= 6


def test_output_ends_with_the_context(world, new_request):
    received = world.add(new_request("one", prompt(40), max_tokens=1000))
    world.drain()
    assert received.ends[0] == StopMatch(EngineFinishReason.LENGTH)
    assert len(received.token_ids[0]) == world.facts.max_model_len - 40


def test_identical_prompts_sent_together_compute_the_prefix_once(world_type, new_request):
    world = world_type(200, config(max_num_seqs=16, max_num_batched_tokens=64))
    requests = [world.add(new_request(str(number), prompt(40))) for number in range(16)]
    world.drain()
    # The leader computes all of it; the others only what no full block holds, and the last token.
    assert world.scheduler.counters.prefill_tokens == 40 + 15 * 4
    assert [received.finished.usage.cached_tokens for received in requests] == [0] + [36] * 15


def test_a_follower_goes_on_when_its_leader_is_cancelled(world, new_request):
    world.add(new_request("leader", prompt(40)))
    follower = world.add(new_request("follower", prompt(40)))
    other = world.add(new_request("other", prompt(3, first=5)))
    world.next_plan()
    world.answer()
    plan = world.next_plan()
    assert [added.num_prompt_tokens for added in plan.added] == []
    world.scheduler.abort("leader", EngineFinishReason.CANCELLED)
    plan = world.next_plan()
    assert [(added.num_prompt_tokens, added.num_computed) for added in plan.added] == [(40, 32), (3, 0)]
    world.drain()
    assert follower.finished.usage.cached_tokens == 32
    assert other.finished is not None


def test_a_waiting_follower_lets_others_pass(world, new_request):
    world.add(new_request("leader", prompt(17)))
    world.add(new_request("follower", prompt(17)))
    world.add(new_request("other", prompt(3, first=5)))
    world.next_plan()
    assert [added.token_ids for added in world.next_plan().added] == [prompt(17), prompt(3, first=5)]
    world.drain()


def test_tenants_share_nothing(world, new_request):
    for tenant in ("a", "b"):
        received = world.add(new_request(tenant, prompt(16), tenant=tenant))
        world.drain()
        assert received.finished.usage.cached_tokens == 0
        again = world.add(new_request(tenant + " again", prompt(16), tenant=tenant))
        assert again.accepted.cached_tokens == 12
        world.drain()
        assert again.finished.usage.cached_tokens == 12


def test_output_is_cached_too(world, new_request):
    first = world.add(new_request("turn", prompt(6), max_tokens=7))
    world.drain()
    history = prompt(6) + first.token_ids[0]
    second = world.add(new_request("next turn", [*history, 3]))
    world.drain()
    assert second.finished.usage.cached_tokens == 12


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_choices_share_the_prompt_and_compute_its_tail(world_type, new_request, enable_prefix_caching):
    world = world_type(64, config(enable_prefix_caching=enable_prefix_caching, max_num_batched_tokens=64))
    received = world.add(new_request("one", prompt(22), n=4, max_tokens=6, sampling=SamplingParams(seed=9)))
    first = world.next_plan()
    assert len(first.added) == 1
    second = world.next_plan()
    assert [added.num_computed for added in second.added] == [20] * 3
    shared = first.added[0].block_ids[:5]
    assert all(added.block_ids[:5] == shared for added in second.added)
    assert not set.intersection(*(set(added.block_ids[5:]) for added in second.added))
    seeds = [added.sampling.seed for added in (*first.added, *second.added)]
    assert seeds[0] == 9
    assert len(set(seeds)) == 4
    world.drain()
    assert world.scheduler.counters.prefill_tokens == 22 + 3 * 2
    assert received.finished.usage.prompt_tokens == 22
    assert received.finished.usage.output_tokens == 24


def test_choices_that_must_wait_keep_the_prompt(world_type, new_request):
    world = world_type(64, config(max_num_seqs=1, enable_prefix_caching=False))
    world.add(new_request("one", prompt(14), n=3, max_tokens=4))
    world.drain()
    assert world.scheduler.counters.prefill_tokens == 14 + 2 * 2


def small_world(world_type, new_request, **changes):
    """Two rows that outgrow a pool of 8 blocks of 4."""
    world = world_type(8, config(**changes))
    first = world.add(new_request("first", prompt(12), max_tokens=16, priority=1))
    second = world.add(new_request("second", prompt(12, first=1), max_tokens=16, priority=0))
    return world, first, second


@pytest.mark.parametrize(("policy", "loser"), [(Policy.FCFS, "second"), (Policy.PRIORITY, "first")])
def test_the_lowest_rank_gives_way_and_loses_nothing(world_type, new_request, policy, loser):
    world, *_ = small_world(world_type, new_request, policy=policy)
    world.drain()
    preemptions = {name: received.finished.timings.preemptions for name, received in world.received.items()}
    assert preemptions.pop(loser) > 0
    assert list(preemptions.values()) == [0]


def test_the_token_in_flight_of_a_preempted_row_is_kept(world_type, new_request):
    world, _, second = small_world(world_type, new_request, max_num_batched_tokens=64)
    num_known = -1
    while not world.scheduler.counters.preemptions:
        if len(world.plans) == 2:
            world.answer()
        num_known = len(second.token_ids.get(0, []))
        world.next_plan()
    assert world.plans[-1].dropped
    assert any(decode.row in world.plans[-1].dropped for decode in world.plans[-2].decodes)
    world.answer()
    assert len(second.token_ids[0]) == num_known + 1
    # Its newest plan is answered, so it may begin again, with every token.
    world.drain()


def test_lower_priority_runs_first(world_type, new_request):
    world = world_type(64, config(max_num_seqs=1, policy=Policy.PRIORITY))
    for name, priority in (("a", 5), ("b", -3), ("c", 0), ("d", -3)):
        world.add(new_request(name, prompt(3), priority=priority))
    order = []
    while world.alive():
        world.schedule()
        world.answer()
        order += [name for name, received in world.received.items() if received.finished and name not in order]
    assert order == ["b", "d", "c", "a"]


def test_prompt_logprobs_read_no_cache(world, new_request):
    world.add(new_request("plain", prompt(16)))
    world.drain()
    received = world.add(new_request("asking", prompt(16), sampling=SamplingParams(prompt_logprobs=2)))
    assert received.accepted.cached_tokens == 0
    assert world.next_plan().added[0].num_computed == 0
    world.drain()
    assert len(received.prompt_logprobs) == 15


def test_a_cancelled_request_frees_its_blocks_at_once_and_its_row_later(world_type, new_request):
    world = world_type(8, config(max_num_seqs=1))
    world.add(new_request("one", prompt(30), max_tokens=2))
    row = world.next_plan().added[0].row
    world.next_plan()
    world.scheduler.abort("one", EngineFinishReason.CANCELLED)
    assert world.scheduler.kv.usage == 0.0
    assert not world.scheduler.abort("one", EngineFinishReason.CANCELLED)
    world.add(new_request("two", prompt(31, first=2), max_tokens=2))
    world.answer()
    plan = world.next_plan()
    # All blocks are given out again in the plan that drops the row, whose number rests.
    assert plan.dropped == [row]
    assert plan.added[0].row != row
    assert len(plan.added[0].block_ids) == 8
    world.drain()


def test_admission_is_bounded(world_type, new_request):
    world = world_type(10, config(max_queued_requests=2, max_queued_tokens=30))

    def refusal(name, length, **fields):
        with pytest.raises(Refused) as refused:
            world.scheduler.add_request(new_request(name, prompt(length), **fields))
        return refused.value

    assert refusal("too large", 38, max_tokens=4).kind is RefusalKind.TOO_LARGE
    assert refusal("too large", 38, max_tokens=4).retry_after_ms is None
    assert refusal("late", 3, deadline=-1.0).kind is RefusalKind.DEADLINE
    assert world.add(new_request("just fits", prompt(30), max_tokens=11)).accepted.queue_position == 0
    assert refusal("tokens", 1).kind is RefusalKind.QUEUE_FULL
    world.next_plan()
    assert world.add(new_request("1", prompt(3))).accepted.queue_position == 0
    assert world.add(new_request("2", prompt(3))).accepted.queue_position == 1
    assert refusal("requests", 3).retry_after_ms is not None
    world.drain()


def test_a_prediction_takes_room_in_the_queue_until_its_request_begins(world_type, new_request):
    world = world_type(10, config(max_queued_tokens=30))
    world.add(new_request("one", prompt(5), max_tokens=1, n=2, prediction=[1] * 20))
    with pytest.raises(Refused) as refused:
        world.scheduler.add_request(new_request("two", prompt(5), prediction=[1]))
    assert refused.value.kind is RefusalKind.QUEUE_FULL
    world.add(new_request("three", prompt(5)))
    world.next_plan()
    world.add(new_request("four", prompt(5), prediction=[1] * 20))
    world.drain()


def test_usage_and_timings(world_type, new_request):
    now = [100.0]
    world = world_type(64, config())
    world.scheduler = type(world.scheduler)(world.facts, world.config, clock=lambda: now[0])
    received = world.add(new_request("one", prompt(5), max_tokens=2, arrival=99.5))
    world.next_plan()
    now[0] = 102.0
    world.answer()
    now[0] = 103.0
    world.next_plan()
    world.answer()
    timings = received.finished.timings
    assert (timings.queued_us, timings.prefill_us, timings.first_token_us) == (500_000, 2_000_000, 2_500_000)
    assert timings.total_us == 3_500_000
    waiting = world.add(new_request("waiting", prompt(5), arrival=103.0))
    now[0] = 104.0
    world.scheduler.abort("waiting", EngineFinishReason.DEADLINE, "too late")
    assert waiting.finished.message == "too late"
    assert waiting.finished.timings.queued_us == waiting.finished.timings.total_us == 1_000_000
    assert waiting.finished.timings.first_token_us == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"max_queued_requests": 0},
        {"max_plans_in_flight": 3},
    ],
)
def test_a_wrong_config_is_named(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        config(**changes)

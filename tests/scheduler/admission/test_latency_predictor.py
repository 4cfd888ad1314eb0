"""What is predicted, and what it is worth: who is late, and who is refused for it."""

import math

from known_requests import make_config, make_prompt

from penstock.scheduler.admission.latency_predictor import UNTESTED_S
from penstock.scheduler.request import EngineFinishReason
from penstock.scheduler.timing.queued_work import sequence_work


def knows_no_lateness(world):
    return all(sorted(ratios)[-4] < 1.5 for ratios in world.scheduler.predictor._queue_time._lateness.values())


def test_what_is_cached_is_not_counted_when_a_request_might_be_late(world_type, new_request):
    """A turn of a conversation computes little; alone and without a cache it would take its whole prompt's time."""
    world = world_type(100, make_config(max_num_batched_tokens=8))
    world.learn_step_time()
    shared = make_prompt(40)
    world.add(new_request("first", shared, max_tokens=1))
    world.drain()
    world.add(new_request("other", make_prompt(8, first=5), max_tokens=30))
    world.step()
    turn = world.add(new_request("turn", [*shared, 1], max_tokens=1, deadline=math.inf))
    request = world.scheduler.requests["turn"].request
    request.deadline = world.now + 2.5
    request.arrival = world.now - 20.0  # as if it had come long ago, when there was time for all of it
    world.drain()
    assert turn.finished.reason is EngineFinishReason.LENGTH


def test_requests_cut_by_too_short_a_deadline_do_not_count_as_load(world_type, new_request):
    world = world_type(100, make_config())
    world.learn_step_time()
    for number in range(8):
        now = world.now
        received = world.add(new_request(str(number), make_prompt(8), max_tokens=30, deadline=now + 5, arrival=now))
        world.drain()
        assert received.finished.reason is EngineFinishReason.DEADLINE
        assert received.token_ids[0]
    assert knows_no_lateness(world)


def test_unread_streams_do_not_count_as_load(world_type, new_request):
    world = world_type(100, make_config())
    world.learn_step_time()
    for number in range(8):
        world.add(new_request(str(number), make_prompt(8), max_tokens=10))
        world.step()
        world.scheduler.hold(str(number), True)
        world.now += 1000.0
        world.scheduler.hold(str(number), False)
        world.drain()
    assert knows_no_lateness(world)


def test_a_worker_death_does_not_count_as_load(world_type, new_request):
    world = world_type(100, make_config())
    world.learn_step_time()
    for number in range(8):
        world.add(new_request(str(number), make_prompt(8), max_tokens=10))
    world.step()
    world.recover(blames_step=False)
    world.now += 1000.0
    world.drain()
    assert knows_no_lateness(world)


def test_a_bad_start_is_found_out(world_type, new_request):
    """The first prompt took very long. Beside a stream that only decodes nothing would ever tell that others do not."""
    world = world_type(100, make_config())
    world.add(new_request("long", make_prompt(2), max_tokens=40))
    world.step_us = 1_000_000_000
    world.step()
    world.step_us = 1_000_000
    for _ in range(8):
        world.step()

    def add(name):
        return world.add(new_request(name, make_prompt(8), deadline=world.now + 20, arrival=world.now))

    assert add("refused") is None
    world.now += UNTESTED_S
    taken = add("taken")
    assert taken is not None
    assert add("too many") is None
    world.drain()
    assert taken.finished.reason is EngineFinishReason.LENGTH


def test_bad_times_are_forgotten(world_type, new_request):
    """Beside one long stream, so that somebody is always there."""
    world = world_type(100, make_config())
    world.learn_step_time()
    for _ in range(8):
        for expected_s in (2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0):
            world.scheduler.predictor._queue_time.learn_total(sequence_work(8, 8, 4), expected_s, math.inf)
    world.add(new_request("long", make_prompt(2), max_tokens=40))
    world.step()
    fields = {"max_tokens": 4}
    assert world.add(new_request("refused", make_prompt(8), deadline=world.now + 9, **fields)) is None
    world.now += UNTESTED_S
    assert world.add(new_request("taken", make_prompt(8), deadline=world.now + 9, **fields)) is not None
    world.drain()


def test_the_next_plan_waits_for_most_of_a_step_once_steps_are_known(world_type, new_request):
    world = world_type(100, make_config())
    predictor = world.scheduler.predictor
    world.add(new_request("first", make_prompt(8), max_tokens=40))
    world.schedule()
    assert predictor.spare_s == 0.0, "nothing is known yet"
    world.drain()
    world.add(new_request("second", make_prompt(8, first=3), max_tokens=2))
    assert predictor.spare_s == 0.0, "the worker has nothing to do"
    world.schedule()
    step_s = predictor.oldest_step_s
    assert 0.7 * step_s < predictor.spare_s < 0.8 * step_s
    world.now += 0.7 * step_s
    assert 0 < predictor.spare_s < 0.1 * step_s
    world.now += 0.1 * step_s
    assert predictor.spare_s <= 0
    world.schedule()
    assert predictor.spare_s == 0.0, "both plans are on their way"


def test_a_request_with_a_target_does_not_count_on_a_prompt_that_is_computed_after_its_own(world_type, new_request):
    world = world_type(100, make_config(), max_num_batched_tokens=8)
    shared = make_prompt(32)
    world.add(new_request("leader", shared, max_tokens=2))
    world.step()
    world.add(new_request("patient", [*shared, 1], max_tokens=2))
    world.add(new_request("hasty", [*shared, 1], max_tokens=2, first_token_target=world.now + 30.0))
    assert [world.scheduler.requests[name].work.tokens for name in ("patient", "hasty")] == [1, 25]
    world.drain()

"""What a timeline says a request waited for, plan by plan."""

import pytest

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.policy import Policy
from penstock.scheduler.request import Change, EngineFinishReason
from penstock.scheduler.timeline_entry import (
    EntryKind,
    HoldCause,
    PreemptionCause,
    PreemptionDetail,
    WaitCause,
    WaitDetail,
)


def config(**changes):
    return SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 16} | changes)


def prompt(length, first=0):
    return [(first + position) % 7 for position in range(length)]


@pytest.fixture
def new_world(world_type):
    def make(num_blocks=64, **changes):
        return world_type(num_blocks, config(**changes))

    return make


def steps(world, number):
    for _ in range(number):
        world.schedule()
        world.answer()
        world.check()


def die(world):
    """The worker dies of a step."""
    world.scheduler.recover(blames_step=True)
    world._new_worker()


def finish(world):
    while world.alive():
        steps(world, 1)


def told(world, name, *kinds):
    """What is known of a request, or of these kinds of it."""
    return [entry for entry in world.scheduler.explain(name).entries() if not kinds or entry.kind in kinds]


def waits(world, name):
    """What it waited for; what it was told to wait for when it came is left out."""
    return [entry.detail for entry in told(world, name, EntryKind.WAITED, EntryKind.HELD)][1:]


def test_too_few_blocks(new_world, new_request):
    world = new_world(num_blocks=10)
    world.add(new_request("large", prompt(15), max_tokens=4))
    steps(world, 1)
    world.add(new_request("larger", prompt(28, first=3), max_tokens=4))
    finish(world)
    assert waits(world, "larger") == [WaitDetail(WaitCause.BLOCKS, (6, 7))]


def test_every_row_runs(new_world, new_request):
    world = new_world(max_num_seqs=1)
    world.add(new_request("runs", prompt(8), max_tokens=6))
    steps(world, 1)
    world.add(new_request("first", prompt(5, first=1)))
    world.add(new_request("second", prompt(5, first=2)))
    steps(world, 1)
    assert waits(world, "first") == [WaitDetail(WaitCause.ROWS, (1,))]
    (first_cause,) = told(world, "second", EntryKind.WAITED)
    assert first_cause.detail == WaitDetail(WaitCause.TURN, (1,))
    finish(world)


def test_the_step_is_spent_on_others(new_world, new_request):
    world = new_world()
    world.add(new_request("long", prompt(32)))
    world.add(new_request("next", prompt(4, first=3)))
    finish(world)
    assert waits(world, "next") == [WaitDetail(WaitCause.BUDGET, (16,))]


def test_another_computes_its_prefix(new_world, new_request):
    world = new_world(max_num_batched_tokens=64)
    world.add(new_request("one", prompt(20)))
    world.add(new_request("two", prompt(20)))
    finish(world)
    assert waits(world, "two") == [WaitDetail(WaitCause.PREFIX)]


def test_its_own_last_answer(new_world, new_request):
    world = new_world(num_blocks=4)
    world.add(new_request("first", prompt(7), max_tokens=6))
    world.add(new_request("second", prompt(7, first=3), max_tokens=6))
    world.schedule()  # from now on a step ahead of the answers
    finish(world)
    preempted = told(world, "second", EntryKind.PREEMPTED)
    assert [entry.detail for entry in preempted] == [PreemptionDetail(PreemptionCause.BLOCKS, "first", 1)]
    after = [entry for entry in told(world, "second") if entry.at >= preempted[0].at][1:]
    assert [entry.kind for entry in after] == [
        *(EntryKind.WAITED, EntryKind.WAITED),
        *(EntryKind.BEGAN, EntryKind.PREFILLED, EntryKind.DECODED, EntryKind.ENDED),
    ]
    assert after[0].detail == WaitDetail(WaitCause.LAST_RESULT)
    assert after[1].detail == WaitDetail(WaitCause.BLOCKS, (1, 3))


def test_one_that_goes_first_takes_its_row(new_world, new_request):
    world = new_world(max_num_seqs=1, policy=Policy.PRIORITY)
    world.add(new_request("slow", prompt(5), max_tokens=20, priority=5))
    steps(world, 3)
    world.add(new_request("urgent", prompt(5, first=2), priority=-1))
    finish(world)
    preempted = told(world, "slow", EntryKind.PREEMPTED)
    assert [entry.detail for entry in preempted] == [PreemptionDetail(PreemptionCause.ORDER, "urgent")]
    assert waits(world, "slow")[-1] == WaitDetail(WaitCause.ROWS, (1,))


def test_the_new_worker_then_a_trial(new_world, new_request):
    """After two fatal steps some of those that were in them wait for the others."""
    world = new_world()
    for name in ("a", "b"):
        world.add(new_request(name, prompt(8, first=ord(name)), max_tokens=8))
    world.add(new_request("later", prompt(4)))
    steps(world, 2)
    world.schedule()
    die(world)
    for name in ("a", "b", "later"):
        assert waits(world, name)[-1] == WaitDetail(WaitCause.WORKER)
    world.schedule()
    die(world)
    steps(world, 1)
    held = [name for name in world.received if told(world, name, EntryKind.HELD)]
    assert 0 < len(held) < 3
    for name in held:
        assert waits(world, name)[-1] is HoldCause.SUSPECT
    finish(world)
    for name in ("a", "b", "later"):
        assert told(world, name, EntryKind.RESTARTED)
        assert told(world, name)[-1].detail is EngineFinishReason.LENGTH


def test_an_unread_stream_is_explained_as_waiting(new_world, new_request):
    world = new_world()
    world.add(new_request("runs", prompt(5), max_tokens=8))
    steps(world, 2)
    world.scheduler.hold("runs", True)
    steps(world, 4)
    assert waits(world, "runs") == [HoldCause.UNREAD]
    world.scheduler.hold("runs", False)
    finish(world)
    decoded = told(world, "runs", EntryKind.DECODED)
    assert [entry.num_tokens for entry in decoded] == [2, 6]
    steps_told = [(entry.first_step, entry.last_step) for entry in decoded]
    assert steps_told == [(0, 1), (2, 7)]


def test_a_limit_that_is_raised_at_the_end(new_world, new_request):
    """The steps of a row are told right also if it was thought complete and then goes on."""
    world = new_world()
    world.add(new_request("a", prompt(5), max_tokens=2))
    world.add(new_request("b", prompt(5, first=2), max_tokens=12))
    world.schedule()
    world.schedule()
    world.answer()
    world.schedule()  # without a: its last token is on its way
    world.received["a"].limits = {0: 5}
    world.scheduler.update_request("a", Change(max_tokens=5))
    finish(world)
    (decoded,) = told(world, "a", EntryKind.DECODED)
    assert decoded.num_tokens == 5
    assert (decoded.first_step, decoded.last_step) == (0, 5)


def test_one_that_never_began(new_world, new_request):
    world = new_world(max_num_seqs=1)
    world.add(new_request("runs", prompt(5), max_tokens=9))
    steps(world, 1)
    world.add(new_request("waits", prompt(5, first=2)))
    steps(world, 2)
    world.scheduler.abort("waits", EngineFinishReason.DEADLINE)
    assert {entry.kind for entry in told(world, "waits")} == {EntryKind.ACCEPTED, EntryKind.WAITED, EntryKind.ENDED}
    timeline = world.scheduler.explain("waits")
    assert (timeline.ended_by, timeline.first_token_at) == (EngineFinishReason.DEADLINE, None)
    finish(world)


def test_one_that_was_abandoned(new_world, new_request):
    world = new_world()
    world.add(new_request("runs", prompt(5), max_tokens=9))
    steps(world, 4)
    world.scheduler.abandon(EngineFinishReason.WORKER_DIED, "no worker can be had")
    (decoded,) = told(world, "runs", EntryKind.DECODED)
    assert (decoded.first_step, decoded.last_step, decoded.num_tokens) == (0, 3, 4)
    assert told(world, "runs")[-1].detail is EngineFinishReason.WORKER_DIED

"""Rows that gain several tokens in a step: what plans allow them, what they take from others, what is told of it."""

import pytest
from worlds import turns

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import RowFailure, SamplingParams
from penstock.scheduler.request import Change, EngineFinishReason, SpeculationCounts
from penstock.scheduler.testing.simulation import checked_simulation
from penstock.scheduler.timeline_entry import EntryKind
from penstock.scheduler.timing.queued_work import sequence_work
from penstock.scheduler.timing.step_time import StepTimeModel, StepWork
from penstock.scheduler.worker_config import WorkerFacts


def config(**changes):
    return SchedulerConfig(**{"max_num_seqs": 5, "max_num_batched_tokens": 16} | changes)


def prompt(length, first=0):
    return [(first + position * position // 5) % 7 for position in range(length)]


@pytest.fixture
def new_world(world_type):
    def make(num_blocks=100, budget=16, **changes):
        return world_type(num_blocks, config(max_num_batched_tokens=budget, **changes), budget)

    return make


def run(world):
    return list(turns(world))


@pytest.mark.parametrize("plans_in_flight", [1, 2])
@pytest.mark.parametrize("max_drafts", [1, 3, 7])
def test_a_row_is_in_every_plan_until_its_end(new_world, new_request, max_drafts, plans_in_flight):
    """Also near its end, where all that it may still have could be in flight."""
    world = new_world(budget=64, max_plans_in_flight=plans_in_flight)
    received = world.add(new_request("one", prompt(5), max_tokens=30, max_drafts=max_drafts))
    plans = run(world)
    assert received.finished.reason is EngineFinishReason.LENGTH
    decodes = [plan.decodes[0].max_tokens for plan in plans if plan.decodes]
    # At the very end a plan in flight may bring all that is left.
    assert sum(not plan.decodes for plan in plans[1:]) <= plans_in_flight - 1
    assert max(decodes) == 1 + max_drafts
    assert len(decodes) < 29
    assert all(plan.max_drafts == sum(decode.max_tokens - 1 for decode in plan.decodes) for plan in plans)


def test_who_does_not_want_drafts_has_none(new_world, new_request):
    world = new_world(budget=64)
    world.add(new_request("none", prompt(5), max_tokens=12))
    world.add(new_request("some", prompt(5, 1), max_tokens=12, max_drafts=2))
    rows: dict[int, int] = {}
    seen = set()
    for plan in turns(world):
        rows |= {added.row: added.max_drafts for added in plan.added}
        seen |= {(rows[decode.row], decode.max_tokens) for decode in plan.decodes}
    assert seen == {(0, 1), (2, 1), (2, 3)}
    assert world.received["none"].finished.speculation is None


def test_an_added_row_carries_its_drafting_settings(new_world, new_request):
    world = new_world()
    world.add(new_request("one", prompt(5), tenant="a", max_drafts=3, grammar="start: /x/", prediction=[1, 2]))
    world.schedule()
    (added,) = world.plans[-1].added
    assert (added.max_drafts, added.grammar, added.tenant, added.prediction) == (3, "start: /x/", "a", [1, 2])


def test_drafts_from_a_prediction_are_counted_apart(new_world, new_request):
    world = new_world(budget=64)
    predicted, drafted = (
        world.add(new_request(name, prompt(5, first), max_tokens=20, max_drafts=3, prediction=prediction))
        for name, first, prediction in (("predicted", 0, [1]), ("drafted", 1, []))
    )
    run(world)
    counts = predicted.finished.speculation
    assert 0 < counts.accepted_predicted == counts.accepted < counts.predicted == counts.drafted
    assert drafted.finished.speculation.predicted == 0 < drafted.finished.speculation.drafted
    assert world.scheduler.counters.speculation.predicted == counts.predicted


def test_chunks_come_before_drafts(new_world, new_request):
    def chunks(max_drafts):
        world = new_world()
        for number in range(3):
            world.add(new_request(str(number), prompt(4, number), max_tokens=8, max_drafts=max_drafts))
        world.schedule()
        world.answer()
        world.add(new_request("long", prompt(30, 5), max_tokens=1))
        sizes, room = [], []
        for plan in turns(world):
            sizes += [chunk.end - chunk.start for chunk in plan.chunks]
            used = sum(chunk.end - chunk.start for chunk in plan.chunks) + len(plan.decodes)
            if plan.decodes and plan.chunks:
                room.append((16 - used, plan.max_drafts))
        return sizes, room

    without, _ = chunks(0)
    sizes, room = chunks(7)
    assert sizes == without == [13, 13, 4]
    assert room[0] == room[1] == (0, 0)
    left, drafts = room[2]
    assert 0 < drafts <= left


def test_as_many_rows_run_as_without_drafts(new_world, new_request):
    world = new_world(budget=4, max_num_seqs=5)
    for number in range(4):
        world.add(new_request(str(number), prompt(1, number), max_tokens=6, max_drafts=7))
    most = 0
    for plan in turns(world):
        most = max(most, len(plan.decodes))
        assert len(plan.decodes) + plan.max_drafts + sum(c.end - c.start for c in plan.chunks) <= 4
    assert most == 4


@pytest.mark.parametrize("length", range(8, 16))
def test_drafts_take_no_blocks_from_others(new_world, new_request, length):
    """Just enough blocks for both outputs, and none for tokens that might come; and where a row has drafts, the next
    plan's token needs no block."""
    world = new_world(num_blocks=2 * -(-(length + 20) // 4), budget=64)
    for number in range(2):
        world.add(new_request(str(number), prompt(length, number), max_tokens=21, max_drafts=5))
    decodes = []
    for plan in turns(world):
        decodes += [decode.max_tokens for decode in plan.decodes]
        for sequence in world.scheduler._planner.running.decoding:
            assert sequence.in_flight[-1] == 1 or sequence.capacity >= sequence.length_bound
    assert world.scheduler.counters.preemptions == 0
    assert {1, 6} <= set(decodes)


def test_draft_acceptance_is_reported(new_world, new_request):
    world = new_world(budget=64)
    received = world.add(new_request("one", prompt(5), max_tokens=30, max_drafts=3, n=2))
    expected, answered = SpeculationCounts(), world.worker.run

    def run_and_count(plan):
        result = answered(plan)
        for row in result.rows:
            if row.num_drafted and world.scheduler._planner.rows.holder(row.row, row.epoch).live.num_ended < 2:
                expected.count_step(row.num_drafted, len(row.token_ids) - 1)
        return result

    world.worker.run = run_and_count
    run(world)
    told = received.finished.speculation
    assert told == expected
    assert told.accepted < told.drafted == sum(told.drafted_at)
    assert len(told.drafted_at) == 3
    assert all(accepted <= drafted for accepted, drafted in zip(told.accepted_at, told.drafted_at, strict=False))
    assert world.scheduler.counters.speculation == told
    entries = [entry for entry in world.scheduler.explain("one").entries() if entry.kind is EntryKind.DECODED]
    assert len(entries) == 2
    assert sum(entry.detail.num_accepted for entry in entries) == told.accepted
    assert sum(entry.detail.num_drafted for entry in entries) == told.drafted


def test_a_limit_that_is_lowered_in_flight_and_raised_again(new_world, new_request):
    world = new_world(budget=64)
    received = world.add(new_request("one", prompt(8), max_tokens=30, max_drafts=7))
    world.schedule()
    world.answer()
    world.schedule()  # which may bring eight tokens, and brings one
    world.scheduler.update_request("one", Change(max_tokens=5))
    assert not world.schedule(), "all five may be in flight"
    world.answer()
    world.scheduler.update_request("one", Change(max_tokens=25))
    received.limits[0] = received.most_tokens = 25
    run(world)
    assert received.finished.reason is EngineFinishReason.LENGTH
    assert len(received.token_ids[0]) == 25
    (entry,) = [entry for entry in world.scheduler.explain("one").entries() if entry.kind is EntryKind.DECODED]
    assert entry.num_tokens == 25


@pytest.mark.parametrize("has_token", [True, False])
def test_a_grammar_that_cannot_be_followed_ends_only_its_request(new_world, new_request, has_token):
    """All choices of it; what was chosen before stays, and so does everybody else."""
    world = new_world(budget=64)
    failing = world.add(new_request("failing", prompt(5), max_tokens=20, n=2, grammar="g", max_drafts=2))
    other = world.add(new_request("other", prompt(5, 3), max_tokens=20, sampling=SamplingParams(logprobs=1)))
    for _ in range(4):
        world.schedule()
        world.answer()
    before = sum(map(len, failing.token_ids.values()))
    world.schedule()
    answered = world.worker.run

    def run_and_fail(plan):
        result = answered(plan)
        row = next(row for row in result.rows if row.row == failed)
        row.failure = "too costly"
        if not has_token:
            row.token_ids, row.num_drafted = [], 0
        return result

    sequence = world.scheduler.requests["failing"].sequences[1]
    failed = sequence.row
    world.worker.run = run_and_fail
    world.scheduler.update(world.worker.run(world.plans.popleft()))
    world.worker.run = answered
    world.check()
    assert (failing.finished.reason, failing.finished.message) == (EngineFinishReason.GRAMMAR, "too costly")
    assert failing.finished.context is None
    assert failing.finished.usage.output_tokens == sum(map(len, failing.token_ids.values())) >= before > 0
    failing.check_end()
    run(world)
    assert other.finished.reason is EngineFinishReason.LENGTH


def test_a_grammar_that_fails_with_the_last_token_has_not_failed(new_world, new_request):
    world = new_world()
    received = world.add(new_request("one", prompt(5), max_tokens=1, grammar="g"))
    world.schedule()
    result = world.worker.run(world.plans.popleft())
    result.rows[0].failure = "too costly"
    world.scheduler.update(result)
    world.drain()
    assert received.finished.reason is EngineFinishReason.LENGTH


@pytest.mark.parametrize("late_steps", ["   ", "a  b c    d ef ", " " * 50])
@pytest.mark.parametrize("max_tokens", [1, 20])
@pytest.mark.parametrize("length", [1, 5, 16, 17])
def test_a_token_of_a_row_that_sits_out_comes_later(new_world, new_request, length, max_tokens, late_steps):
    """While its grammar is compiled or its mask is late; beside others, and with plans in flight that were made before
    that was known."""
    world = new_world(budget=64)
    other = world.add(new_request("other", prompt(5, 3), max_tokens=20))
    received = world.add(
        new_request("waiting", prompt(length), max_tokens=max_tokens, n=2, grammar=late_steps, max_drafts=2)
    )
    run(world)
    assert received.finished.reason is other.finished.reason is EngineFinishReason.LENGTH
    assert [len(token_ids) for token_ids in received.token_ids.values()] == [max_tokens] * 2


# What is expected of steps ------------------------------------------------------------------------------------------

_STEP_S, _DRAFT_S = 0.010, 0.001


def taught(num_drafted, num_accepted=0, rows=4):
    model = StepTimeModel()
    for number in range(256):
        drafted = num_drafted if number % 2 else 0
        accepted = num_accepted if number % 2 else 0
        model.observe(StepWork(0, 0, rows, rows * 100), _STEP_S + _DRAFT_S * drafted, drafted, accepted)
    return model


def test_a_step_is_predicted_with_the_drafts_that_there_were_lately():
    model = taught(num_drafted=16)
    work = StepWork(0, 0, 4, 400)
    assert model.predict(work) == pytest.approx(_STEP_S + 8 * _DRAFT_S, rel=0.1)
    assert model.predict(StepWork(0, 0, 2, 400)) < model.predict(work)


def test_the_least_that_a_step_takes_has_no_drafts():
    """By it the next plan is sent: if the worker drafts nothing this time, it must not wait."""
    work = StepWork(0, 0, 4, 400)
    assert taught(num_drafted=16).predict(work, drafts=0) == pytest.approx(_STEP_S, rel=0.1)
    without = taught(num_drafted=0)
    assert without.predict(work, drafts=0) == without.predict(work)


def test_what_a_row_gains_in_a_step():
    assert taught(0).tokens_each == 1
    assert taught(num_drafted=16, num_accepted=8).tokens_each == pytest.approx(2, abs=0.1)


def test_times_are_predicted_by_what_is_accepted():
    """A request with drafts is through in half of the steps; what its successors are told follows."""
    facts = WorkerFacts(1000, 16, 100, 4000, 8, 256, "fake", "fake", "cpu", "float32", "float32", 0, 0)
    simulation = checked_simulation(facts, SchedulerConfig(max_num_seqs=8), lambda work: 0.01)
    for number in range(40):
        simulation.ask(number * 1.0, 20, 61, max_drafts=2)
    simulation.run()
    model = simulation.scheduler.predictor._model
    assert model.tokens_each > 1.8
    request, ended_at = simulation.outcomes[-1].request, simulation.outcomes[-1].ended_at
    assert ended_at is not None
    took = ended_at - request.arrival
    assert simulation.scheduler.predictor.alone_s(request, sequence_work(20, 20, 16)) == pytest.approx(took, rel=0.25)
    assert took < 0.45, "61 steps would be longer"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (RowFailure.COSTLY, EngineFinishReason.GRAMMAR),
        (RowFailure.DEAD_END, EngineFinishReason.DEAD_END),
        (RowFailure.SLOW, EngineFinishReason.SLOW_CONSTRAINT),
    ],
)
def test_each_failure_of_a_grammar_ends_its_request_in_its_own_way(new_world, new_request, kind, reason):
    world = new_world()
    received = world.add(new_request("one", prompt(5), max_tokens=5, grammar="g"))
    world.schedule()
    result = world.worker.run(world.plans.popleft())
    result.rows[0].failure, result.rows[0].failure_kind, result.rows[0].token_ids = "no more", kind, []
    world.scheduler.update(result)
    assert (received.finished.reason, received.finished.message) == (reason, "no more")

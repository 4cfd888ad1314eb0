"""The controller drafts where drafts pay, stops where they do not, notices when that changes, and keeps every bound.
Time is simulated."""

import itertools
import random

import pytest

from penstock.models.batch.batch import build_batch
from penstock.models.batch.rows import RowTable
from penstock.models.speculative.controller import SpeculationController
from penstock.models.speculative.cost_model import StepCost
from penstock.models.speculative.drafter import Drafter, Proposal
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, Decode, Pooling, RowResult, SamplingParams, StepPlan, StepResult

# ----------------------------------------------------------------------------------------------------------- simulation


def linear(n):
    """A device without a moment to spare."""
    return 1e-3 * n


def idle(n):
    """One whose steps take the same whatever they compute."""
    return 0.05


def real(n):
    """A model whose weights take a while to read, and that can compute a few tokens meanwhile."""
    return 0.05 + 0.0005 * n + 0.002 * max(0, n - 32)


def small(n):
    """A model for which asking is a part of a step."""
    return 2e-4 + 2e-5 * n


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("seconds", [linear, idle, real, small])
@pytest.mark.parametrize(("ask_s", "confidence"), [(1e-6, 0.9), (5e-5, 0.3)])
def test_drafts_that_are_never_right_lose_little(simulation, num_rows, seconds, ask_s, confidence):
    world = simulation(seconds, lambda row, at: False, num_rows, ask_s, confidence)
    world.run(32)  # what is learned at the beginning costs more, and is of no weight
    speed, told = world.run(1600 // num_rows + 100)
    assert speed > 0.97
    assert sum(one.num_drafted for one in told) < sum(one.num_steps for one in told)


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("seconds", [idle, real])
def test_drafts_that_are_always_right_are_as_long_as_may_be(simulation, num_rows, seconds):
    world = simulation(seconds, lambda row, at: True, num_rows)
    world.run(64)
    speed, told = world.run(540)
    best = max((1 + k) * seconds(num_rows) / seconds(num_rows * (1 + k)) for k in range(9))
    assert speed > 0.95 * best
    if seconds is idle:
        assert all(one.num_steps <= 540 // 9 + 10 for one in told)


@pytest.mark.parametrize("chance", [0.2, 0.45, 0.6])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_that_do_not_quite_pay_lose_little_where_times_are_noise(simulation, chance, seed):
    """Sixteen rows are as many as the device computes while it reads its weights; its pace drifts as well."""

    def true(n):
        return max(0.034 + 0.0002 * n, 0.0026 * n)

    rng, pace, sizes = random.Random(seed), 1.0, []

    def noisy(n):
        nonlocal pace
        pace = min(1.3, max(0.8, pace * rng.lognormvariate(0, 0.02)))
        sizes.append(n)
        return true(n) * pace * rng.lognormvariate(0, 0.08)

    acceptance = [min(0.95, max(0.02, chance + rng.uniform(-0.3, 0.3))) for _ in range(16)]

    def is_right(row, at):
        return random.Random(row.number * 100_003 + at * 17 + seed).random() < acceptance[row.number]

    world = simulation(noisy, is_right, num_rows=16, confidence=0.5)
    sizes.clear()
    _, told = world.run(400)
    assert sum(one.num_drafted for one in told) > 10, "it must go on trying"
    assert 400 * true(16) / sum(map(true, sizes[1:])) > 0.97


def test_drafting_is_decided_for_each_row_separately(simulation):
    world = simulation(linear, lambda row, at: row.number == 3, num_rows=8)
    world.seconds = linear
    world.device.seconds = lambda n: 0.01 + 0.001 * n
    world.run(100)
    speed, told = world.run(400)
    assert told[3].num_accepted > 250
    assert all(one.num_drafted < 60 for row, one in enumerate(told) if row != 3)
    assert speed > 0.97


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("seconds", [real, small])
def test_it_is_noticed_when_drafts_begin_to_be_right_and_when_they_cease(simulation, num_rows, seconds):
    world = simulation(seconds, lambda row, at: False, num_rows, ask_s=2e-5)
    world.run(500)
    world.drafter.is_right = lambda row, at: at > 600
    speed, told = world.run(1500)
    assert speed > 1.2
    world.drafter.is_right = lambda row, at: at <= 300
    _, told = world.run(300)
    assert all(one.num_accepted > 150 for one in told)
    world.run(400)
    world.drafter.is_right = lambda row, at: False
    assert world.run(800)[0] > 0.97


def cheap(n):
    """A round of a small model beside the one that takes 50 ms."""
    return 1e-3 + 1e-5 * n


def dear(n):
    """A round of one that is nearly as large."""
    return 0.03 + 1e-4 * n


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("seconds", [linear, real, small])
@pytest.mark.parametrize("round_s", [cheap, dear])
@pytest.mark.parametrize("read_s", [0.0, 2e-4])
def test_models_whose_drafts_are_never_right_lose_little(simulation, num_rows, seconds, round_s, read_s):
    world = simulation(seconds, lambda row, at: False, num_rows, round_s=round_s, read_s=read_s, confidence=0.6)
    world.run(64)
    speed, told = world.run(6400 // num_rows)
    assert speed > 0.97
    assert sum(one.num_drafted for one in told) < sum(one.num_steps for one in told)


@pytest.mark.parametrize("round_s", [None, cheap])
def test_steps_that_turn_out_to_cost_more_than_was_measured_are_noticed(simulation, round_s):
    world = simulation(idle, lambda row, at: (at + row.number) % 5 == 0, num_rows=16, round_s=round_s, confidence=0.6)
    world.device.seconds = lambda n: 0.05 if n <= 16 else 0.072
    world.run(200)
    assert world.run(200)[0] > 0.97


@pytest.mark.parametrize("read_s", [0.0, 2e-4])
def test_a_drafter_runs_only_as_many_rounds_as_pay(simulation, read_s):
    every_other = simulation(real, lambda row, at: at % 3 > 0, round_s=cheap, read_s=read_s, confidence=0.6)
    every_other.run(200)
    asked, rounds = every_other.drafter.num_asked, every_other.drafter.num_rounds
    speed, _ = every_other.run(600)
    assert speed > 1.8
    mean_rounds = (every_other.drafter.num_rounds - rounds) / (every_other.drafter.num_asked - asked)
    assert 1.5 < mean_rounds < 6
    never = simulation(real, lambda row, at: True, round_s=lambda n: 0.06, read_s=read_s)
    never.run(200)
    asked = never.drafter.num_asked
    assert never.run(600)[0] > 0.97
    assert never.drafter.num_asked - asked < 30


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("read_s", [0.0, 2e-4])
def test_a_model_that_begins_to_be_right_is_noticed(simulation, num_rows, read_s):
    world = simulation(real, lambda row, at: False, num_rows, round_s=cheap, read_s=read_s, confidence=0.6)
    world.run(500)
    assert not world.drafter.followed
    world.drafter.is_right = lambda row, at: True
    world.run(1500)
    speed, _ = world.run(400)
    assert speed > 2
    assert not world.drafter.followed  # of rows that are gone


# --------------------------------------------------------------------------------------------------------------- bounds


class Generous(Drafter):
    """Always has more than it is asked for, and remembers whom it was asked about."""

    def __init__(self):
        self.asked = []

    def propose(self, wanted):
        self.asked += [(row.number, max_drafts) for row, max_drafts in wanted]
        return [Proposal([1] * 20, [1.0] * 20) for _ in wanted]

    def drop_row(self, row):
        self.asked.append(row.number)


def new_table(*max_drafts, pooling=None):
    table = RowTable(num_blocks=1, block_size=1 << 20, hidden_size=8)
    added = [
        AddedRow(row, 0, [1, 2], 2, 1, [0], SamplingParams(), pooling, max_drafts=most)
        for row, most in enumerate(max_drafts)
    ]
    table.apply(StepPlan(0, [], added, [], [], []))
    return table


def never():
    pytest.fail("waits for tokens, though no row is drafted for")


def drafting_of(drafter, table, runs_ahead=False, max_drafts=8):
    """Where drafts cost next to nothing."""
    costs = StepCost(256)
    costs.measure(lambda size: None, 64, itertools.count(step=0.1).__next__)
    controller = SpeculationController(drafter, max_drafts, costs, runs_ahead, clock=lambda: 0.0)
    for row in range(len(table._rows)):
        controller.add_row(table[row])
    controller.propose(StepPlan(0, [], [], [], [], []), table, never, {})  # the first step is without drafts
    return controller


def step(controller, table, *decodes, room, forced=None):
    plan = StepPlan(0, [], [], [], [], list(decodes), max_drafts=room)
    drafted = controller.propose(plan, table, lambda: None, forced or {})
    return {row: len(drafts) for row, drafts in drafted.drafts.items()}


def test_every_bound_is_kept():
    table = new_table(6, 3, 0, 20, 20)
    controller = drafting_of(drafter := Generous(), table)
    decodes = [Decode(0, 9), Decode(1, 9), Decode(2, 9), Decode(3, 9), Decode(4, 5)]
    assert step(controller, table, *decodes, room=100) == {0: 6, 1: 3, 3: 8, 4: 4}
    assert drafter.asked == [(0, 6), (1, 3), (3, 8), (4, 4)]
    assert sum(step(controller, table, *decodes, room=7).values()) == 7
    assert step(controller, table, *decodes, room=0) == {}
    assert step(controller, table, Decode(0, 1), Decode(1, 3), room=100) == {1: 2}


def test_rows_whose_tokens_are_forced_get_no_other_drafts():
    table = new_table(8, 8)
    controller = drafting_of(drafter := Generous(), table)
    decodes = [Decode(0, 9), Decode(1, 9)]
    assert step(controller, table, *decodes, room=10, forced={0: [5, 5, 5]}) == {0: 3, 1: 7}
    assert drafter.asked == [(1, 7)]
    assert step(controller, table, *decodes, room=3, forced={0: [5, 5, 5]}) == {0: 3}


def test_pooled_rows_and_rows_without_drafts_are_nothing_to_a_drafter():
    for table in (new_table(0, 0), new_table(4, 4, pooling=Pooling.MEAN)):
        controller = drafting_of(drafter := Generous(), table)
        assert step(controller, table, Decode(0, 5), Decode(1, 5), room=10) == {}
        controller.drop_row(table[0])
        assert drafter.asked == []


def test_a_dropped_row_is_forgotten():
    table = new_table(4)
    controller = drafting_of(drafter := Generous(), table)
    controller.drop_row(table[0])
    assert drafter.asked == [0]
    assert step(controller, table, Decode(0, 5), room=10) == {}


def test_what_waits_for_the_last_step_is_rare_where_it_does_not_pay():
    table = new_table(*[8] * 4)
    controller = drafting_of(Generous(), table, runs_ahead=True)
    decodes = [Decode(row, 9) for row in range(4)]
    batch = build_batch(table, StepPlan(0, [], [], [], [], [Decode(row, 1) for row in range(4)]))
    waits: list[None] = []
    for _ in range(1000):
        num_waits = len(waits)
        plan = StepPlan(0, [], [], [], [], decodes, max_drafts=32)
        drafted = controller.propose(plan, table, lambda: waits.append(None), {})
        has_waited = len(waits) > num_waits
        rows = [RowResult(row, 0, 2, [5], num_drafted=len(drafts)) for row, drafts in drafted.drafts.items()]
        # Waiting takes as long again as the step.
        controller.observe(drafted, batch, rows, 0.2 if has_waited else 0.1, is_fenced=has_waited)
    assert 2 <= len(waits) <= 20


def test_a_step_without_drafts_waits_for_one_that_has_some(simulation, monkeypatch):
    world = simulation(idle, lambda row, at: True)
    world.device.runs_ahead = True
    table = new_table()
    controller = drafting_of(world.drafter, table)
    runner = Runner(world.device, controller, clock=world.clock.nanoseconds)
    added = AddedRow(0, 0, [1, 2], 2, 0, [0], SamplingParams(temperature=0.0), max_drafts=4)
    runner.start_step(StepPlan(0, [], [added], [], [Chunk(0, 0, 2)], []))()
    finish = runner.start_step(StepPlan(1, [], [], [], [], [Decode(0, 5)], max_drafts=4))
    answers: list[StepResult] = []
    # Where the row stands is known when the step's answer is.
    monkeypatch.setattr(runner._newest, "wait", lambda: answers.append(finish()))
    after = runner.start_step(StepPlan(2, [], [], [], [], [Decode(0, 1)]))()
    [answer] = answers
    assert answer.rows[0].num_drafted == 4
    assert len(answer.rows[0].token_ids) == 5
    assert after.rows[0].num_computed == answer.rows[0].num_computed + 1

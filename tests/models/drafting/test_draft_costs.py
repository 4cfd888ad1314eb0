"""The draft lengths that give the most tokens per second, and the measured costs of steps and drafts behind them."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from penstock.models.speculative.controller import OBSERVE_EVERY, SpeculationController
from penstock.models.speculative.cost_model import MEASURE_S, SIZES, StepCost
from penstock.models.speculative.draft_cost import DraftCost
from penstock.models.speculative.draft_lengths import MIN_CHANCE, MIN_GAIN, choose_lengths, choose_rounds
from penstock.models.speculative.ngram import NgramDrafter
from penstock.scheduler.plan import Decode, StepPlan
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig

acceptance = st.lists(
    st.lists(st.floats(0.03, 1.0), max_size=4).map(lambda parts: list(itertools.accumulate(parts, float.__mul__))),
    min_size=1,
    max_size=3,
)


@given(acceptance, st.lists(st.floats(0.0, 1.0), max_size=12), st.integers(3, 5))
def test_no_other_lengths_bring_more_tokens_a_second(acceptance, costs, num_certain):
    seconds = list(itertools.accumulate(costs, initial=1.0))
    counts, token_s = choose_lengths(acceptance, num_certain, seconds)
    assert sum(counts) < len(seconds)

    def token_seconds(counts):
        tokens = num_certain + sum(sum(row[:count]) for row, count in zip(acceptance, counts, strict=True))
        return seconds[sum(counts)] / tokens

    assert token_seconds(counts) == pytest.approx(token_s)
    num_taken = sum(counts)
    for others in itertools.product(*(range(len(row) + 1) for row in acceptance)):
        # No other choice is better, except with drafts whose probability is too low to be considered.
        if sum(others) < len(seconds):
            last = [row[count - 1] for row, count in zip(acceptance, others, strict=True) if count]
            is_little = num_taken == 0 or min(last, default=1.0) < MIN_CHANCE
            assert token_s <= token_seconds(others) * (MIN_GAIN + (0.2 if last and min(last) < MIN_CHANCE else 1e-9))
            assert is_little or token_s <= token_seconds(others) * (1 + 1e-9)
    if num_taken:
        assert token_s * MIN_GAIN < seconds[0] / num_certain


@given(acceptance, st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12), st.floats(0.0, 0.5), st.integers(1, 5))
def test_a_drafter_runs_exactly_when_some_number_of_rounds_pays(acceptance, costs, round_s, last):
    seconds = list(itertools.accumulate(costs, initial=1.0))
    most = max(map(len, acceptance))
    found = choose_rounds(acceptance, 3, seconds, lambda number: number * round_s, last)
    assert found.number <= most
    assert all(count <= found.number for count in found.counts)
    with_one = {
        number: choose_lengths(
            [row[:number] for row in acceptance], 3, [1.0, *(step_s + number * round_s for step_s in seconds[1:])]
        )
        for number in range(1, most + 1)
    }
    assert bool(found.number) == any(any(lengths.counts) for lengths in with_one.values())
    if found.number:
        assert found.token_s == with_one[found.number].token_s
        nearer = [with_one[number].token_s for number in (1, last - 1, last, last + 1) if number in with_one]
        assert found.token_s <= min(nearer)


def test_costs_between_the_measured_sizes_are_interpolated_and_never_fall(simulation):
    now = 0.0

    def run(size):
        nonlocal now
        now += 0.01 + 0.001 * size + (0.05 if size == 8 else 0.0)

    costs = StepCost(2048)
    costs.measure(run, 2048, lambda: now)
    assert [costs.seconds(size) for size in (1, 2, 5, 64)] == pytest.approx([0.011, 0.012, 0.015, 0.074])
    assert costs.seconds(8) == pytest.approx(costs.seconds(12))
    assert costs.seconds(164) == pytest.approx(0.174)
    assert costs.span(2046, 10) == pytest.approx([0.01 + 0.001 * size for size in (2046, 2047, 2048)])


def test_measuring_a_large_model_ends_in_time():
    now, sizes = 0.0, []

    def run(size):
        nonlocal now
        now += 0.07
        sizes.append(size)

    costs = StepCost(2048)
    costs.measure(run, 2048, lambda: now)
    assert sizes == list((SIZES * 2)[: len(sizes)])
    assert MEASURE_S <= now < MEASURE_S + 0.08
    assert [costs.seconds(size) for size in (1, 64)] == pytest.approx([0.07, 0.07])


def test_a_small_limit_is_kept():
    now, sizes = 0.0, []

    def run(size):
        nonlocal now
        now += 0.01 * size
        sizes.append(size)

    costs = StepCost(6)
    costs.measure(run, 3, lambda: now)
    assert max(sizes) == 3
    assert costs.seconds(6) == pytest.approx(0.06)


def test_costs_follow_what_steps_take():
    costs = StepCost(256)
    now = itertools.count(step=0.01)
    costs.measure(lambda size: None, 256, now.__next__)
    for _ in range(100):
        costs.observe(4, 0.02, is_fenced=True)
        costs.observe(4, 0.005, is_fenced=False)
    assert costs.seconds(64) == pytest.approx(0.02, rel=0.01)
    assert costs.seconds(64, is_fenced=False) == pytest.approx(0.005, rel=0.01)
    for _ in range(1000):
        costs.observe(4, 0.02, is_fenced=True)
        costs.observe(32, 0.04, is_fenced=True)
    assert costs.seconds(4) == pytest.approx(0.02, rel=0.1)
    assert costs.seconds(32) == pytest.approx(0.04, rel=0.1)


def test_a_size_that_was_measured_too_short_is_outweighed_by_those_that_are_seen():
    """Steps of 16 to 20 tokens are seen often. A step of 24, which is never run, was fast when it was measured."""
    now = 0.0

    def run(size):
        nonlocal now
        now += 0.041 if size == 24 else 0.0025 * size

    costs = StepCost(64)
    costs.measure(run, 64, lambda: now)
    assert costs.seconds(20) < 0.042
    for _ in range(40):
        for size in (16, 17, 20):
            costs.observe(size, 0.0025 * size, is_fenced=True)
    assert [costs.seconds(size) for size in (16, 17, 20)] == pytest.approx([0.04, 0.0425, 0.05], rel=0.08)


def test_what_a_drafter_reads_takes_other_time_than_what_it_drafts():
    now = 0.0

    def run(size):
        nonlocal now
        now += 1e-4 + 1e-5 * size

    costs = DraftCost(2048)
    costs.measure(run, 64, lambda: now)
    assert costs.seconds(4, 3) == pytest.approx(3 * 1.4e-4)
    for _ in range(60):
        costs.observe(1, 2, 256, 2 * 2.2e-4 + 256 * 2e-6)
        for _ in range(4):
            costs.observe(1, 2, 0, 2 * 2.2e-4)
    assert costs.seconds(1, 3) == pytest.approx(3 * 2.2e-4, rel=0.05)
    assert costs.seconds(1, 1, 600) == pytest.approx(2.2e-4 + 600 * 2e-6, rel=0.1)


def test_plain_steps_are_learned_from_while_nothing_repeats():
    """Otherwise only steps with drafts would show what a step takes, and drafts would seem to cost less."""
    costs = StepCost(64)
    controller = SpeculationController(
        NgramDrafter(SpeculationConfig(DraftMethod.AUTO, 8)), 8, costs, runs_ahead=False, clock=lambda: 0.0,
        on_repetition=True,
    )  # fmt: skip
    plain = StepPlan(0, [], [], [], [], [Decode(0, 1)])
    table: Any = {}
    batch: Any = SimpleNamespace(token_ids=[0] * 4, sampled=[0] * 4)
    before = costs.seconds(4)
    for _ in range(10 * OBSERVE_EVERY):
        drafted = controller.propose(plain, table, lambda: None, {})
        controller.observe(drafted, batch, [], 2 * before, is_fenced=True)
    controller._observations.learn()
    assert costs.seconds(4) > 1.5 * before

"""Ratios by turn, with their intervals, and which engine and figure they are about."""

import pytest
from cpu_bench.engines import Engine
from cpu_bench.report.ratios import GOODPUT, RATE, compare, figures_of, paired_ratio
from cpu_bench.results import Measured, Row

OURS, FAST, STEADY = [
    Engine(name, "bf16", "bf16", "weights and KV bf16", "defaults", "none", "")
    for name in ("penstock", "fast", "steady")
]


def measured(label: str, tokens_per_s: float, itl_p99: float = 10.0, turn: int = 0) -> Measured:
    return Measured(
        label, "M1", "W2", turn, f"{label} 1.0", wall_s=10.0, tokens_per_s=tokens_per_s, ttft_p50=1.0, ttft_p99=2.0,
        itl_p50=3.0, itl_p99=itl_p99, ready_s=4.0, rss_bytes=2**30, pss_bytes=2**29, foreign_s=0.0,
    )  # fmt: skip


def test_the_interval_is_students_over_the_logarithms() -> None:
    # Logarithms of 1, 2 and 4: mean log 2, standard deviation log 2; t is 4.303 for three turns.
    found = paired_ratio([10.0, 40.0, 20.0], [10.0, 10.0, 10.0])
    assert found is not None
    reach = 2 ** (4.303 / 3**0.5)
    assert [found.value, found.low, found.high] == pytest.approx([2.0, 2 / reach, 2 * reach])
    assert found.turns == 3


def test_what_changes_for_both_from_turn_to_turn_does_not_widen_it() -> None:
    found = paired_ratio([11.0, 22.0, 5.5], [10.0, 20.0, 5.0])
    assert found is not None
    assert [found.low, found.high] == pytest.approx([1.1, 1.1])
    assert str(found) == "1.10 (1.10 to 1.10)"


def test_one_turn_has_no_interval() -> None:
    found = paired_ratio([3.0], [2.0])
    assert found is not None
    assert (found.low, found.high, found.turns, str(found)) == (None, None, 1, "1.50")


@pytest.mark.parametrize(("ours", "others"), [([], []), ([0.0, 1.0], [1.0, 1.0]), ([1.0], [0.0])])
def test_nothing_is_divided_by_or_into_zero(ours: list[float], others: list[float]) -> None:
    assert paired_ratio(ours, others) is None


def rows_of(*runs: tuple[str, int, float]) -> list[Row]:
    found = [measured(label, rate, turn=turn) for label, turn, rate in runs]
    return [Row(one, tuple(run for run in found if run.engine == one.label)) for one in (OURS, FAST, STEADY)]


def test_turns_that_one_engine_lacks_are_left_out() -> None:
    rows = rows_of(
        ("penstock/bf16", 0, 30.0), ("penstock/bf16", 1, 20.0), ("penstock/bf16", 4, 90.0),
        ("fast/bf16", 0, 20.0), ("fast/bf16", 1, 10.0), ("fast/bf16", 2, 15.0), ("steady/bf16", 0, 1.0),
    )  # fmt: skip
    rate = compare(rows, "W2")[0]
    assert (rate.figure, rate.other.engine) == (RATE, FAST)
    assert rate.ratio is not None
    assert rate.ratio.value == pytest.approx((1.5 * 2.0) ** 0.5)
    assert rate.ratio.turns == 2


def test_runs_of_one_turn_are_one_value() -> None:
    rows = rows_of(
        ("penstock/bf16", 0, 10.0), ("penstock/bf16", 0, 20.0), ("penstock/bf16", 0, 99.0),
        ("fast/bf16", 0, 10.0), ("steady/bf16", 0, 1.0),
    )  # fmt: skip
    ratio = compare(rows, "W1")[0].ratio
    assert ratio is not None
    assert ratio.value == pytest.approx(2.0)
    assert ratio.turns == 1


def test_each_figure_has_a_best_of_its_own() -> None:
    rows = [
        Row(OURS, (measured("penstock/bf16", 150.0, 8.0),)),
        Row(FAST, (measured("fast/bf16", 100.0, 50.0),)),
        Row(STEADY, (measured("steady/bf16", 60.0, 10.0),)),
    ]
    assert [(each.figure.name, each.other.engine.name) for each in compare(rows, "W2")] == [
        ("tokens_per_s", "fast"), ("ttft_p50", "fast"), ("itl_p99", "steady"),
    ]  # fmt: skip


def test_arrivals_are_compared_by_goodput_and_conversations_by_later_turns() -> None:
    assert figures_of("W5")[0] is GOODPUT
    assert [figure.name for figure in figures_of("W6")] == ["tokens_per_s", "later_ttft_p50", "itl_p99"]

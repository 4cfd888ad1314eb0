"""Figures from events, medians and ratios, and what is said where an engine gave nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
from cpu_bench import results
from cpu_bench.engines import Engine, engines
from cpu_bench.results import Measured, Row, far_behind
from cpu_bench.wire import Ran


def engine(name: str, variant: str = "bf16", precision: str = "bf16", *, is_reference: bool = True) -> Engine:
    return Engine(name, variant, precision, "weights bf16", "as it comes", "none", "", is_reference=is_reference)


def measured(
    label: str, tokens_per_s: float, itl_p99: float = 10.0, *, foreign_s: float = 0.0, **extra: float
) -> Measured:
    return Measured(
        label, "M1", "W2", 0, f"{label} 1.0", wall_s=10.0, tokens_per_s=tokens_per_s, ttft_p50=1.0, ttft_p99=2.0,
        itl_p50=3.0, itl_p99=itl_p99, ready_s=4.0, rss_bytes=2**30, pss_bytes=2**29, foreign_s=foreign_s, extra=extra,
    )  # fmt: skip


OURS, FAST, STEADY = engine("penstock"), engine("fast"), engine("steady")
ALL = [OURS, FAST, STEADY]


def test_timing_is_from_when_all_requests_are_there() -> None:
    requests = [([1, 2], 3), ([3], 1)]
    ran = Ran(100.0, 104.0, [[(101.0, 1), (101.5, 1), (104.0, 1)], [(103.0, 1)]])
    figures = results.timing(requests, ran)
    assert figures["wall_s"] == 4.0
    assert figures["tokens_per_s"] == 1.0
    assert figures["ttft_p50"] == pytest.approx(2000)
    assert figures["itl_p50"] == pytest.approx(1500)
    assert figures["itl_p99"] == pytest.approx(500 + 0.99 * 2000)


def test_a_missing_token_is_no_result() -> None:
    with pytest.raises(ValueError, match="request 1 gave 0 tokens and not 2"):
        results.timing([([1], 1), ([1], 2)], Ran(0.0, 1.0, [[(0.5, 1)], []]))


@pytest.mark.parametrize(("share", "wanted"), [(0.0, 1.0), (0.5, 2.5), (1.0, 4.0), (0.99, 3.97)])
def test_quantiles_lie_between_the_nearest(share: float, wanted: float) -> None:
    assert results.quantile([4.0, 1.0, 3.0, 2.0], share) == pytest.approx(wanted)
    assert results.quantile([], share) == 0.0


def test_the_table_has_medians_ratios_and_the_floor() -> None:
    runs = [
        measured("penstock/bf16", 120.0, 4.0, loop_lag_p99_ms=7.0),
        measured("penstock/bf16", 150.0, 5.0, loop_lag_p99_ms=9.0),
        measured("penstock/bf16", 900.0, 6.0, loop_lag_p99_ms=8.0),
        measured("fast/bf16", 100.0, 50.0),
        measured("steady/bf16", 60.0, 10.0, foreign_s=2.0),
    ]
    text = results.tables(runs, ALL, {}, {("M1", "W2", "bf16"): 200.0})
    assert "### M1, W2, bf16" in text
    assert "| penstock/bf16 | 150 |  | 75% |" in text
    assert "| fast/bf16 | 100 | 1.50x | 50% |" in text
    assert "| steady/bf16 | 60.0 | 2.50x | 30% |" in text
    assert "| 2.0 (!) |" in text
    assert text.count("(!) |") == 1
    assert "Tokens a second: 1.50x the best other, fast/bf16." in text
    assert "at p99: 0.50x the best other, steady/bf16." in text
    assert "event loop is 8.0 ms late at p99 of its worst 2 s" in text
    assert "Medians of 1 to 3 repetitions" in text
    assert "- fast/bf16 (fast/bf16 1.0): weights bf16; as it comes" in text


def test_who_is_slow_but_steady_is_not_far_behind_where_lateness_counts() -> None:
    runs = [
        measured("penstock/bf16", 500.0, 1.0),
        measured("fast/bf16", 100.0, 50.0),
        measured("steady/bf16", 6.0, 10.0),
    ]
    rows = [Row(one, (run,)) for one, run in zip(ALL, runs, strict=True)]
    assert far_behind(rows) == set()
    assert far_behind([Row(row.engine, (replace(row.runs[0], workload="W1"),)) for row in rows]) == {"steady/bf16"}
    assert far_behind(rows[:1]) == set()


def test_no_ratio_to_the_best_while_one_is_missing() -> None:
    runs = [measured("penstock/bf16", 150.0), measured("fast/bf16", 100.0)]
    text = results.tables(runs, ALL, {"steady/bf16 on M1": "nobody installed it"}, {})
    assert "No ratio to the best: steady/bf16 gave no figures." in text
    assert "x the best other" not in text
    assert "- missing: steady/bf16 on M1: nobody installed it" in text


def test_without_ours_there_is_no_ratio_at_all() -> None:
    text = results.tables([measured("fast/bf16", 100.0), measured("steady/bf16", 60.0)], ALL, {}, {})
    assert "No ratio to the best: penstock/bf16 gave no figures." in text
    assert "x |" not in text


def test_who_keeps_fewer_bits_is_shown_and_is_not_the_best() -> None:
    narrow = engine("fast", "bf16-kv8", is_reference=False)
    runs = [measured("penstock/bf16", 150.0), measured("fast/bf16", 100.0), measured("fast/bf16-kv8", 125.0)]
    text = results.tables(runs, [OURS, FAST, narrow], {}, {})
    assert "| fast/bf16-kv8 | 125 | 1.20x |" in text
    assert "Tokens a second: 1.50x the best other, fast/bf16." in text


def test_results_are_kept(tmp_path: Path) -> None:
    runs = [measured("penstock/bf16", 150.0, loop_lag_p99_ms=3.0), measured("fast/bf16", 100.0)]
    for run in runs:
        results.append(tmp_path / "results.jsonl", run)
    assert results.read(tmp_path / "results.jsonl") == runs


def test_the_engines_are_distinguishable() -> None:
    labels = [one.label for one in engines()]
    assert len(set(labels)) == len(labels)
    ours = [one.precision for one in engines() if one.name == "penstock"]
    assert ours == ["bf16", "int8", "int4"]
    assert {one.name for one in engines() if one.precision == "bf16"} == {
        "penstock", "vllm-cpu", "openvino", "llama.cpp", "transformers"
    }  # fmt: skip

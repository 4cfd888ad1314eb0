"""Figures from events, medians and ratios, and what is said where an engine gave nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
from cpu_bench import results
from cpu_bench.__main__ import arrivals_per_s
from cpu_bench.engines import Engine, engines
from cpu_bench.report.rows import page_rows
from cpu_bench.report.tables import tables
from cpu_bench.results import Measured, Row, far_behind


def engine(name: str, variant: str = "bf16", precision: str = "bf16", *, is_reference: bool = True) -> Engine:
    return Engine(name, variant, precision, "weights bf16", "as it comes", "none", "", is_reference=is_reference)


def measured(
    label: str, tokens_per_s: float, itl_p99: float = 10.0, *, foreign_s: float = 0.0, **extra: float
) -> Measured:
    return Measured(
        label, "M1", "W2", 0, f"{label} 1.0 (build 3, commit a1), torch 2",
        wall_s=10.0, tokens_per_s=tokens_per_s, ttft_p50=1.0, ttft_p99=2.0,
        itl_p50=3.0, itl_p99=itl_p99, ready_s=4.0, rss_bytes=2**30, pss_bytes=2**29, foreign_s=foreign_s, extra=extra,
    )  # fmt: skip


OURS, FAST, STEADY = engine("penstock"), engine("fast"), engine("steady")
ALL = [OURS, FAST, STEADY]


def test_the_table_has_medians_ratios_and_the_floor() -> None:
    runs = [
        measured("penstock/bf16", 120.0, 4.0, loop_lag_p99_ms=7.0),
        measured("penstock/bf16", 150.0, 5.0, loop_lag_p99_ms=9.0),
        measured("penstock/bf16", 900.0, 6.0, loop_lag_p99_ms=8.0),
        measured("fast/bf16", 100.0, 50.0),
        measured("steady/bf16", 60.0, 10.0, foreign_s=2.0),
    ]
    text = tables(runs, ALL, {}, {("M1", "W2", "bf16"): 200.0})
    assert "### M1, W2, bf16" in text
    assert "| penstock/bf16 | 150 |  | 75% |" in text
    assert "| fast/bf16 | 100 | 1.50x | 50% |" in text
    assert "| steady/bf16 | 60.0 | 2.50x | 30% |" in text
    assert "| 2.0 (!) |" in text
    assert text.count("(!) |") == 1
    assert "Tokens per second: 1.50x the best other, fast/bf16 (1 turn)." in text
    assert "Between tokens at p99: 0.50x the best other, steady/bf16 (1 turn)." in text
    assert "event loop is 8.0 ms late at p99 of its worst 2 s" in text
    assert "Medians of 1 to 3 repetitions" in text
    assert "- fast/bf16 (fast/bf16 1.0 (build 3, commit a1), torch 2): weights bf16; as it comes" in text


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
    text = tables(runs, ALL, {"steady/bf16 on M1": "it is not installed"}, {})
    assert "No ratio to the best: steady/bf16 gave no figures." in text
    assert "x the best other" not in text
    assert "- missing: steady/bf16 on M1: it is not installed" in text


def test_without_ours_there_is_no_ratio_at_all() -> None:
    text = tables([measured("fast/bf16", 100.0), measured("steady/bf16", 60.0)], ALL, {}, {})
    assert "No ratio to the best: penstock/bf16 gave no figures." in text
    assert "x |" not in text


def test_who_keeps_fewer_bits_is_shown_and_is_not_the_best() -> None:
    narrow = engine("fast", "bf16-kv8", is_reference=False)
    runs = [measured("penstock/bf16", 150.0), measured("fast/bf16", 100.0), measured("fast/bf16-kv8", 125.0)]
    text = tables(runs, [OURS, FAST, narrow], {}, {})
    assert "| fast/bf16-kv8 | 125 | 1.20x |" in text
    assert "Tokens per second: 1.50x the best other, fast/bf16 (1 turn)." in text


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
    others = {"vllm-cpu", "vllm-zen", "openvino", "llama.cpp", "ik_llama.cpp"}
    assert {one.name for one in engines() if one.precision == "bf16"} == {"penstock", *others, "transformers"}
    for precision in ("int8", "int4"):
        assert {one.name for one in engines() if one.precision == precision} == {"penstock", *others}


def open_loop(label: str, goodput: float) -> Measured:
    figures = {"arrivals_per_s": 0.4, "goodput_by_mean_per_s": goodput, "goodput_share": goodput / 0.4}
    return replace(measured(label, 9.0), workload="W5", extra={"goodput_per_s": goodput, **figures})


def test_arrivals_have_columns_of_their_own() -> None:
    runs = [open_loop("penstock/bf16", 0.3), open_loop("fast/bf16", 0.15), open_loop("steady/bf16", 0.1)]
    text = tables(runs, ALL, {}, {})
    assert "| arrivals/s | goodput/s | by the mean gap | share in time |" in text
    assert "| 0.400 | 0.300 | 0.300 | 75% |" in text
    assert "Goodput: 2.00x the best other, fast/bf16 (1 turn)." in text


def test_no_goodput_is_no_ratio() -> None:
    runs = [open_loop("penstock/bf16", 0.3), open_loop("fast/bf16", 0.0), open_loop("steady/bf16", 0.0)]
    assert "Goodput: no ratio, as ours or the best other's, fast/bf16's, is 0." in tables(runs, ALL, {}, {})


def test_conversations_have_the_first_token_of_later_turns() -> None:
    labels = ("penstock/bf16", "fast/bf16", "steady/bf16")
    runs = [replace(measured(label, 9.0, later_ttft_p50=70.0), workload="W6") for label in labels]
    text = tables(runs, ALL, {}, {})
    assert "| first token p50, turns 2 to 6 |" in text
    assert "First token from the second turn on at p50: 1.00x the best other" in text


def test_the_rows_of_the_pages_have_ratios_with_intervals() -> None:
    turns = [(100.0, 50.0), (121.0, 55.0), (144.0, 60.0)]
    runs = [
        replace(measured(label, rate), repetition=turn)
        for turn, rates in enumerate(turns)
        for label, rate in zip(("penstock/bf16", "fast/bf16"), rates, strict=True)
    ]
    runs += [measured("steady/bf16", 20.0, 2.0), open_loop("penstock/bf16", 0.3), open_loop("fast/bf16", 0.2)]
    text = page_rows(runs, ALL, {("M1", "W2", "bf16"): 242.0})
    head = "| M1, bf16 | W1 | W2 | W3 | W4 | first token | between tokens | W5, in time per s | W6, first token | RSS |"
    assert text.startswith(head)
    assert "| penstock |  | 121 |  |  | 1.0 | 10.0 | 0.300 |  | 1.0 |" in text
    assert "| fast 1.0, bf16 |  | 55.0 |  |  | 1.0 | 10.0 | 0.200 |  | 1.0 |" in text
    assert "| **penstock / best other** |  | 2.19 (1.75 to 2.75) |  |  | 1.00 (1.00 to 1.00) | 5.00 |  |  |  |" in text
    assert "| share of the floor |  | 50% |" in text
    readme = text.partition("README.md, M1:\n\n")[2]
    assert "| engine | weights | 16 requests | mixed lengths | shared prefix | 1 request | p99 between" in readme
    assert "| steady 1.0, bf16 | bf16 |  | 20.0 |  |  | 2.0 ms |" in readme


def test_what_a_machine_cannot_run_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results.append(path, measured("fast/bf16", 100.0))
    results.append_unsupported(path, "zen/bf16", "it needs another processor")
    assert [run.engine for run in results.read(path)] == ["fast/bf16"]
    assert results.read_unsupported(path) == {"zen/bf16": "it needs another processor"}


def test_every_engine_states_its_types() -> None:
    assert [one.label for one in engines() if "KV" not in one.numbers or "weights" not in one.numbers] == []


def test_the_rate_of_arrivals_follows_from_the_best_other_engine() -> None:
    runs = [
        replace(measured(label, rate), engine=label)
        for label, rate in (("penstock/bf16", 90.0), ("vllm-cpu/bf16", 30.0), ("openvino/bf16-kv8", 60.0),
                            ("openvino/bf16", 20.0), ("openvino/int8", 70.0))
    ]  # fmt: skip
    # W2 has 1,087 tokens of output in 16 requests.
    assert arrivals_per_s(runs, "M1", "bf16") == pytest.approx(0.7 * 30.0 * 16 / 1087)
    assert arrivals_per_s(runs, "M1", "int4") is None
    assert arrivals_per_s([*runs, open_loop("vllm-cpu/bf16", 0.1)], "M1", "bf16") == 0.4

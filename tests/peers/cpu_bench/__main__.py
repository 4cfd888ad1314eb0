"""Runs ours and the other engines by turns on the same token ids, and prints medians with ratios.

    make bench-cpu                                                M1 and M0, W1 to W6, 3 repetitions: most of a day
    make bench-cpu ARGS='--models M1 --workloads W1 W2 W3 W4'
    make bench-cpu ARGS='--workloads W1 --engines vllm-cpu llama.cpp/bf16'
    make bench-cpu ARGS='--models M0 --repetitions 5'
    make bench-cpu ARGS='--repetitions 1 --add-to today.jsonl'    one more of a run that goes on piece by piece
    make bench-cpu ARGS='--repetitions 0 --add-to today.jsonl'    the tables of what it has
    make bench-cpu ARGS='--models M0 --workloads W5 --arrivals-per-second 2 --open-loop-seconds 2 5'     a short try

W5's requests arrive at 70 % of the rate at which the best other engine of the precision completes W2. That is
computed from the figures of this run and of --add-to, so run W2 first, or both together. Later turns keep the rate.

Where an engine is less than half as fast as the best of the others at its precision, and on W2 also more than twice as
late as the earliest of them, it isn't repeated: it would take most of the time and change no ratio.
The table says how often each was run; --repeat-all repeats all.

Every repetition is a line of JSON in PEERS/results.jsonl, or in --add-to, at once. The rows of the tables in README.md
and docs/benchmarks.md go to a file beside it that ends in .md. A figure is only as good as the quiet around it: run
nothing else meanwhile; rows that were disturbed say so. Fails if ours gave no figures, never because of a figure.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from cpu_bench import ceilings, results, workloads
from cpu_bench.driver import Driver, process_starter
from cpu_bench.engines import OURS, PRECISIONS, Engine, engines
from cpu_bench.floors import SHAPES, Machine, tokens_per_s
from cpu_bench.report.rows import page_rows
from cpu_bench.report.tables import tables
from cpu_bench.results import Measured, Row
from cpu_bench.workloads import OpenLoop

OPEN_LOOP_SHARE = 0.7
"""Rate of W5's arrivals, as a share of the rate at which the best other engine completes W2."""


def main() -> int:
    """Returns the exit status."""
    arguments = _parser().parse_args()
    peers = arguments.peers.absolute()
    chosen = [engine for engine in engines() if _is_chosen(engine, arguments.engines)]
    threads = len(os.sched_getaffinity(0))
    print(f"{time.strftime('%Y-%m-%d %H:%M')}, {threads} threads, {_processor()}", flush=True)
    machine = ceilings.measure(threads)
    print(
        f"this machine at best: reads {machine.bytes_per_s / 1e9:.1f} GB/s ({machine.reading}), "
        f"computes {machine.bf16_operations_per_s / 1e9:,.0f} GFLOP/s in bf16, "
        f"{machine.int8_operations_per_s / 1e9:,.0f} GOP/s in int8",
        flush=True,
    )
    _make_models(peers / "models", arguments.models)
    kept = arguments.add_to or peers / "results.jsonl"

    def tell(measured: Measured) -> None:
        results.append(kept, measured)
        print(_line(measured), flush=True)

    driver = Driver(chosen, peers, process_starter(peers, threads), tell)
    if arguments.add_to is not None and kept.exists():
        driver.measured += results.read(kept)
        driver.unsupported |= results.read_unsupported(kept)
    known = set(driver.unsupported)
    first = 1 + max((run.repetition for run in driver.measured), default=-1)
    try:
        for model in arguments.models:
            _run(driver, model, arguments, range(first, first + arguments.repetitions))
    finally:
        for label in driver.unsupported.keys() - known:
            results.append_unsupported(kept, label, driver.unsupported[label])

    possible = [engine for engine in engines() if engine.label not in driver.unsupported]
    limits = floors(machine, arguments.models)
    print()
    print(results_tables(driver, possible, limits))
    rows = kept.with_suffix(".md")
    rows.write_text(page_rows(driver.measured, possible, limits), encoding="utf-8")
    print(f"\nThe rows of README.md's and docs/benchmarks.md's tables are in {rows}.")
    return 0 if any(run.engine.startswith(f"{OURS}/") for run in driver.measured) else 1


def results_tables(driver: Driver, possible: Sequence[Engine], limits: Mapping[tuple[str, str, str], float]) -> str:
    """Returns all tables. Engines that this machine cannot run are named there, but no ratio waits for them."""
    unsupported = {label: f"this machine cannot run it: {why}" for label, why in driver.unsupported.items()}
    return tables(driver.measured, possible, driver.missing | unsupported, limits)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="the folder that make bench-peers filled")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["M1", "M0"], metavar="NAME")
    parser.add_argument(
        "--workloads", nargs="+", choices=list(workloads.DESCRIPTIONS), default=list(workloads.DESCRIPTIONS)
    )
    parser.add_argument("--engines", nargs="+", metavar="NAME[/VARIANT]", help="which besides ours (default: all)")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N")
    parser.add_argument("--repeat-all", action="store_true", help="engines that are far behind as well: some hours")
    parser.add_argument("--add-to", type=Path, metavar="FILE", help="figures of earlier runs, which count as well")
    parser.add_argument("--arrivals-per-second", type=float, metavar="RATE", help="requests per second of W5")
    parser.add_argument(
        "--open-loop-seconds", nargs=2, type=float, metavar=("WARM-UP", "MEASURED"), default=(60.0, 180.0),
        help="how long W5's requests arrive (default: 60 180)",
    )  # fmt: skip
    return parser


def _run(driver: Driver, model: str, arguments: argparse.Namespace, repetitions: range) -> None:
    """Runs W1 to W4, then W5, whose rate of arrivals follows from W2, and then W6, which needs more room for each
    request."""
    names = [name for name in arguments.workloads if name in workloads.AT_ONCE]
    for phase in (names, [workloads.OPEN_LOOP], [workloads.CONVERSATIONS]):
        if not phase or not set(phase) <= set(arguments.workloads):
            continue
        if phase == [workloads.OPEN_LOOP]:
            for precision in PRECISIONS:
                rate = arguments.arrivals_per_second or arrivals_per_s(driver.measured, model, precision)
                if rate is not None:
                    driver.open_loops[model, precision] = OpenLoop(rate, *arguments.open_loop_seconds)
        driver.run(model, phase, repetitions, repeat_all=arguments.repeat_all)


def arrivals_per_s(runs: Sequence[Measured], model: str, precision: str) -> float | None:
    """Returns W5's requests per second: those of earlier runs of W5, or a share of the best other engine's on W2. None
    without either."""
    others: dict[str, list[Measured]] = defaultdict(list)
    labels = {engine.label: engine for engine in engines() if engine.precision == precision}
    for run in runs:
        engine = labels.get(run.engine)
        if engine is None or run.model != model:
            continue
        if run.workload == workloads.OPEN_LOOP:
            return run.extra["arrivals_per_s"]
        if run.workload == workloads.MIXED and engine.name != OURS and engine.is_reference:
            others[run.engine].append(run)
    fastest = max(
        (Row(labels[label], tuple(found)).median("tokens_per_s") for label, found in others.items()), default=0
    )
    lengths = workloads.build(workloads.MIXED, 0)
    tokens = sum(num_output for _, num_output in lengths) / len(lengths)
    return OPEN_LOOP_SHARE * fastest / tokens if fastest else None


def floors(machine: Machine, models: Sequence[str]) -> dict[tuple[str, str, str], float]:
    """Tokens a second by model, workload and precision."""
    return {
        (model, workload, precision): tokens_per_s(
            machine, SHAPES[model], workloads.build(workload, 0), precision, workloads.SHARED_PREFIX.get(workload, 0)
        )
        for model in models
        for workload in workloads.AT_ONCE
        for precision in PRECISIONS
    }


def _is_chosen(engine: Engine, wanted: Sequence[str] | None) -> bool:
    return wanted is None or engine.name == OURS or engine.name in wanted or engine.label in wanted


def _make_models(folder: Path, names: Sequence[str]) -> None:
    # In a process of its own: what it allocates goes with it.
    command = [sys.executable, "-P", "-m", "cpu_bench.make_models", str(folder), "--names", *names]
    subprocess.run(command, check=True)


def _line(measured: Measured) -> str:
    return (
        f"{measured.model} {measured.workload} {measured.repetition + 1} {measured.engine}: "
        f"{measured.tokens_per_s:,.1f} tokens/s, first token p50 {measured.ttft_p50:,.0f} ms, "
        f"between tokens p50 {measured.itl_p50:.1f} p99 {measured.itl_p99:.1f} ms, "
        f"{_more(measured)}RSS {measured.rss_bytes / 2**30:.2f} GiB, ready in {measured.ready_s:.1f} s, "
        f"foreign CPU {measured.foreign_s:.1f} s"
    )


def _more(measured: Measured) -> str:
    if "goodput_per_s" in measured.extra:
        share = measured.extra["goodput_share"]
        return f"goodput {measured.extra['goodput_per_s']:.3f} requests/s ({share:.0%}), "
    if "later_ttft_p50" in measured.extra:
        return f"first token of turns 2 to 6 p50 {measured.extra['later_ttft_p50']:,.0f} ms, "
    return ""


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else "an unnamed processor"


if __name__ == "__main__":
    sys.exit(main())

"""Runs ours and the other engines by turns on the same token ids, and prints medians with ratios.

    make bench-cpu                                                M1 and M0, W1 to W4, 3 repetitions: two hours
    make bench-cpu ARGS='--workloads W1 --engines vllm-cpu llama.cpp/bf16'
    make bench-cpu ARGS='--models M0 --repetitions 5'
    make bench-cpu ARGS='--repetitions 1 --add-to today.jsonl'    one more of a run that goes on piece by piece
    make bench-cpu ARGS='--repetitions 0 --add-to today.jsonl'    the tables of what it has

Where an engine is less than half as fast as the best of the others at its precision, and on W2 its tokens come more
than twice as late at p99 as the steadiest's, it isn't repeated: it would take most of the time and change no ratio.
The table says how often each was run; --repeat-all repeats all.

Every repetition is a line of JSON in PEERS/results.jsonl, or in --add-to, at once. A figure is only as good as
the quiet around it: run nothing else meanwhile; rows that were disturbed say so. Fails if ours gave no figures, never
because of a figure.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cpu_bench import ceilings, results, workloads
from cpu_bench.driver import Driver, process_starter
from cpu_bench.engines import OURS, PRECISIONS, Engine, engines
from cpu_bench.floors import SHAPES, Machine, tokens_per_s
from cpu_bench.results import Measured


def main() -> int:
    """Returns the exit status."""
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
    arguments = parser.parse_args()
    peers = arguments.peers.absolute()
    chosen = [engine for engine in engines() if _is_chosen(engine, arguments.engines)]
    threads = len(os.sched_getaffinity(0))
    print(f"{time.strftime('%Y-%m-%d %H:%M')}, {threads} threads, {_processor()}", flush=True)
    machine = ceilings.measure(threads)
    print(
        f"this machine at best: reads {machine.bytes_per_s / 1e9:.1f} GB/s, "
        f"computes {machine.bf16_operations_per_s / 1e9:,.0f} GFLOP/s in bf16, "
        f"{machine.int8_operations_per_s / 1e9:,.0f} GOP/s in int8",
        flush=True,
    )
    _make_models(peers / "models", arguments.models)

    def tell(measured: Measured) -> None:
        results.append(arguments.add_to or peers / "results.jsonl", measured)
        print(_line(measured), flush=True)

    driver = Driver(chosen, peers, process_starter(peers, threads), tell)
    if arguments.add_to is not None and arguments.add_to.exists():
        driver.measured += results.read(arguments.add_to)
    first = 1 + max((run.repetition for run in driver.measured), default=-1)
    for model in arguments.models:
        repetitions = range(first, first + arguments.repetitions)
        driver.run(model, arguments.workloads, repetitions, repeat_all=arguments.repeat_all)
    print()
    print(results.tables(driver.measured, engines(), driver.missing, floors(machine, arguments.models)))
    return 0 if any(run.engine.startswith(f"{OURS}/") for run in driver.measured) else 1


def floors(machine: Machine, models: Sequence[str]) -> dict[tuple[str, str, str], float]:
    """Tokens a second by model, workload and precision."""
    return {
        (model, workload, precision): tokens_per_s(
            machine, SHAPES[model], workloads.build(workload, 0), precision, workloads.SHARED_PREFIX.get(workload, 0)
        )
        for model in models
        for workload in workloads.DESCRIPTIONS
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
        f"RSS {measured.rss_bytes / 2**30:.2f} GiB, ready in {measured.ready_s:.1f} s, "
        f"foreign CPU {measured.foreign_s:.1f} s"
    )


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else "an unnamed processor"


if __name__ == "__main__":
    sys.exit(main())

"""Compares penstock over gRPC with OpenVINO in its own process on M0, a tiny model where only overhead counts.

W1 is 16 requests at once, W4 a single one (`tests/peers/cpu_bench/workloads.py`). The engines run in turns, each in a
new process, as in `make bench-cpu`; a turn has five runs of each workload. OpenVINO needs
`make bench-peers ARGS='--only openvino --models M0'` before; without it, only penstock is measured.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cpu_bench.driver import Driver, process_starter
from cpu_bench.engines import OURS, Engine, engines
from cpu_bench.results import Measured, Row

MODEL = "M0"
WORKLOADS = ("W1", "W4")
LABELS = (f"{OURS}/bf16", "openvino/bf16")
TARGET = 1.2


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=5, help="of each engine (default: %(default)s)")
    arguments = parser.parse_args(argv)
    peers, threads = arguments.peers.absolute(), len(os.sched_getaffinity(0))
    command = [sys.executable, "-P", "-m", "cpu_bench.make_models", str(peers / "models"), "--names", MODEL]
    subprocess.run(command, check=True)
    ours, rival = (engine for label in LABELS for engine in engines() if engine.label == label)
    driver = Driver([ours, rival], peers, process_starter(peers, threads), lambda _: None)
    driver.run(MODEL, WORKLOADS, range(arguments.turns), repeat_all=True)
    print(
        f"{MODEL}, bf16, {threads} threads, medians of {arguments.turns} turns; target: {TARGET:g} times {rival.name}"
    )
    for why in (*driver.missing.values(), *driver.unsupported.values()):
        print(f"not measured: {why}")
    for workload in WORKLOADS:
        report(workload, [row for engine in (ours, rival) if (row := row_of(engine, workload, driver.measured)).runs])
    return 0 if any(run.engine == ours.label for run in driver.measured) else 1


def row_of(engine: Engine, workload: str, measured: Sequence[Measured]) -> Row:
    """Returns the runs of an engine on a workload."""
    return Row(engine, tuple(run for run in measured if (run.engine, run.workload) == (engine.label, workload)))


def report(workload: str, rows: Sequence[Row]) -> None:
    """Prints a line for each engine, and the ratios of the medians and of the turns that followed each other."""
    for row in rows:
        print(
            f"{workload}  {row.engine.label:15}{row.median('tokens_per_s'):9,.0f} tokens/s, first token p50 "
            f"{row.median('ttft_p50'):6.1f} ms, between tokens p50 {row.median('itl_p50'):5.2f} p99 "
            f"{row.median('itl_p99'):5.2f} ms{', disturbed by other programs' if row.is_disturbed else ''}"
        )
    if len(rows) == len(LABELS):
        ours, rivals = (row.by_turn("tokens_per_s") for row in rows)
        ratios = sorted(ours[turn] / rivals[turn] for turn in ours.keys() & rivals.keys())
        ratio = rows[0].median("tokens_per_s") / rows[1].median("tokens_per_s")
        print(f"{workload}  {ratio:.2f} times {rows[1].engine.name}; in a turn {ratios[0]:.2f} to {ratios[-1]:.2f}")


if __name__ == "__main__":
    sys.exit(main())

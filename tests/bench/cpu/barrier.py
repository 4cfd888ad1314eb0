"""What the barrier of the CPU library's compute threads costs: atomic writes of one job, and the time of an empty job.

There is a line for each number of threads. A job has four items a thread. Counts are exact on any machine: items wait
until every thread has one, as if each had a core. Times with more threads than cores show what the system's scheduler
costs, not what the barrier does.
"""

import argparse
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock.kernels.cpu.build import SOURCES, find_compiler

SOURCE = Path(__file__).with_name("barrier.cpp")
ITEMS_PER_THREAD = 4


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 16, 64], help="default: 1 2 4 16 64")
    arguments = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        count, clock = build(Path(folder), "count", "-DCOUNT"), build(Path(folder), "time")
        print(f"{cores} cores; {ITEMS_PER_THREAD} items a thread: with one word for all to claim from and one counter, "
              f"{ITEMS_PER_THREAD} writes a thread to each\n")  # fmt: skip
        print("| threads | groups | atomic writes | to the busiest line | by threads | empty job, p50 | p99 |")
        print("|---:|---:|---:|---:|---:|---:|---:|")
        for threads in arguments.threads:
            groups, total, most, writers = run(count, threads)
            median, p99 = run(clock, threads)
            mark = " (oversubscribed)" if threads > cores else ""
            print(f"| {threads} | {groups} | {total} | {most} | {writers} | {median} us{mark} | {p99} us |", flush=True)


def build(folder: Path, name: str, *flags: str) -> Path:
    """Compiles the program."""
    program = folder / name
    command = [*find_compiler(), "-std=c++17", "-O2", "-pthread", *flags, f"-I{SOURCES}", str(SOURCE)]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def run(program: Path, threads: int) -> list[str]:
    """Returns the numbers that it prints."""
    done = subprocess.run([str(program), str(threads)], capture_output=True, text=True, check=True)
    return done.stdout.split()


if __name__ == "__main__":
    main()

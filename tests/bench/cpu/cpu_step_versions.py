"""Steps of an earlier commit and of this checkout, in turns: what a change to the CPU backend gains or costs.

    make bench ARGS='cpu_step_versions --before HEAD~3 --quantization int8 --level avx2'

A machine's speed may change by a third within a minute, so two runs of cpu_step say little about a change of 5 %. Here
two processes have the same model, one of each version, and compute one step after the other. Which comes first
alternates. The ratio of a pair of steps is this version's time by the earlier one's: below 1 is faster. Prints its
median and its quartiles. The earlier version and its CPU library are kept in build/versions.

The load is that of cpu_step: the shape of Qwen3-0.6B, made-up weights, 16 rows, decoding and prompts in one step.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).parents[3]
VERSIONS = ROOT / "build" / "versions"


class Load(NamedTuple):
    """What both processes compute."""

    quantization: str
    threads: int
    rows: int
    prompt: int
    output: int
    rounds: int
    level: str
    """An instruction set; empty: the best one."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the ratios of both kinds of steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="HEAD", metavar="COMMIT", help="the earlier version (default: HEAD)")
    parser.add_argument("--quantization", choices=["none", "int8", "int4"], default="none")
    parser.add_argument("--level", default="", help="instruction set, as in `penstock doctor` (default: the best one)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each row's prompt (default: %(default)s)")
    parser.add_argument("--output", type=int, default=64, help="tokens of each row's output (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="prompts computed and decoded so often (default: 2)")
    parser.add_argument("--child", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    load = Load(**{name: getattr(arguments, name) for name in Load._fields})
    if arguments.child:
        compute(arguments.child, load)
        return
    before = check_out(arguments.before)
    with tempfile.TemporaryDirectory() as folder:
        from cpu_bench.floors import write_config

        write_config(Path(folder))
        report(arguments.before, compare(before, Path(folder), load))


def check_out(commit: str) -> Path:
    """Returns the folder with a commit's files and its CPU library."""
    found = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    name = found.stdout.strip()
    if not name:
        raise SystemExit(f"--before: this checkout has no commit {commit}")
    root = VERSIONS / name / "penstock"
    if not (root / "kernels/cpu/libpenstock_cpu.so").exists():
        print(f"building the CPU library of {name[:12]}", file=sys.stderr)
        root.mkdir(parents=True, exist_ok=True)
        with subprocess.Popen(["git", "archive", name], cwd=ROOT, stdout=subprocess.PIPE) as archive:
            subprocess.run(["tar", "-x", "-C", root], stdin=archive.stdout, check=True)
        subprocess.run([sys.executable, "-P", root / "kernels/cpu/build.py"], check=True)
    return root


def compare(before: Path, model: Path, load: Load) -> dict[str, list[tuple[float, float]]]:
    """Returns the seconds of each pair of steps, by kind."""
    pairs = defaultdict[str, list[tuple[float, float]]](list)
    command = [sys.executable, "-P", str(Path(__file__)), "--child", str(model)]
    command += [f"--{name}={value}" for name, value in load._asdict().items() if value != ""]
    # A folder on the path comes before the checkout that is installed.
    environment = os.environ | {"PYTHONPATH": str(before.parent)}
    pipes = {"cwd": before, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen(command, env=environment, **pipes) as earlier,  # type: ignore[call-overload]
        subprocess.Popen(command, **pipes | {"cwd": ROOT}) as later,  # type: ignore[call-overload]
    ):
        processes = [earlier, later]
        for process in processes:
            _read(process)
        for number in range((load.rounds + 1) * load.output):
            order = processes if number % 2 else processes[::-1]
            timed = {process.pid: _step(process) for process in order}
            if number >= load.output:  # in the first round, the system clears memory
                pairs["prompts" if number % load.output == 0 else "decoding"].append(
                    (timed[earlier.pid], timed[later.pid])
                )
    return pairs


def _step(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(_read(process))


def _read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise SystemExit(f"a process ended with status {process.wait()}: see above")
    return line


def report(commit: str, pairs: dict[str, list[tuple[float, float]]]) -> None:
    """Prints a line for each kind of step."""
    print(f"{'steps':>10} {'pairs':>6} {commit[:12]:>12} {'now':>10} {'ratio':>7}   quartiles")
    for kind, timed in pairs.items():
        ratios = sorted(later / earlier for earlier, later in timed)
        earlier_ms, later_ms = (1000 * statistics.median(times) for times in zip(*timed, strict=True))
        low, ratio, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(f"{kind:>10} {len(timed):>6} {earlier_ms:>9.1f} ms {later_ms:>7.1f} ms {ratio:>7.3f}   "
              f"{low:.3f} to {high:.3f}")  # fmt: skip


def compute(model: str, load: Load) -> None:
    """Computes a step for each line of the standard input, and prints its seconds."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not get between the figures
    from penstock.kernels.cpu import bindings

    if load.level:
        kernels = bindings.find_kernels(load.level)
        if kernels is None:
            raise SystemExit(f"--level: this machine has no {load.level}")
        bindings.find_kernels = lambda level=None, path=None: kernels  # before the backend imports it
    for seconds in _steps(model, load, output):
        print(seconds, file=output)


def _steps(model: str, load: Load, output: IO[str]) -> Iterator[float]:
    from penstock.models.backends.base import load_backend
    from penstock.models.worker.runner import Runner
    from penstock.scheduler.plan import AddedRow, Chunk, Decode, SamplingParams, StepPlan
    from penstock.scheduler.worker_config import WorkerConfig

    blocks = -(-(load.prompt + load.output) // 16)
    config = WorkerConfig(
        model=model,
        backend="cpu",
        load_format="dummy",
        quantization=load.quantization,
        num_threads=load.threads,
        num_blocks=load.rows * blocks + 1,
        max_model_len=load.prompt + load.output,
    )
    runner = Runner(load_backend(config))
    runner.warm()
    print("ready", file=output)
    for number in range(load.rounds + 1):
        added = [
            AddedRow(
                row, number, [300 + (number + row * 7 + i) % 3700 for i in range(load.prompt)], load.prompt, 0,
                list(range(row * blocks, (row + 1) * blocks)), SamplingParams(temperature=0.0),
            )
            for row in range(load.rows)
        ]  # fmt: skip
        prompts = StepPlan(0, [], added, [], [Chunk(row, 0, load.prompt) for row in range(load.rows)], [])
        decoding = StepPlan(0, [], [], [], [], [Decode(row, 1) for row in range(load.rows)])
        for plan in (prompts, *[decoding] * (load.output - 1)):
            if not sys.stdin.readline():
                return
            yield runner.run(plan).computed_us / 1e6
        runner.run(StepPlan(0, list(range(load.rows)), [], [], [], []))


if __name__ == "__main__":
    main()

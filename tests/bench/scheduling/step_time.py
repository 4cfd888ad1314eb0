"""How well the service predicts the times of its steps: each step of a step log, by the steps before it.

Serves a model on one core, and sends random requests, 1 to 32 at a time. With `--step-log`, a log that is there is read
instead, such as that of another commit or of `penstock serve --step-log`. The errors are relative: |predicted /
measured - 1|.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from penstock.clients.bench.grpc_target import GrpcCaller
from penstock.clients.bench.lengths import Uniform
from penstock.clients.bench.runner import run
from penstock.clients.bench.workload import ClosedLoop, RandomLoad
from penstock.clients.cli.options import ConnectionOptions
from penstock.scheduler.simulation.step_log import LoggedStep, read_step_log
from penstock.scheduler.timing.step_time import StepTimeModel
from penstock.service.app.embedded import local_service

VOCAB_SIZE = 4000
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 3, 24, 6, 12)
KINDS = ((1, 4), (5, 16), (17, 10_000))
"""The fewest and the most decoding rows of a kind of step."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-log", type=Path, metavar="FILE", help="read this log; write it if it is not there")
    parser.add_argument("--seconds", type=float, default=4.0, help="at each number of requests (default: 4)")
    parser.add_argument("--model", default="demo", help="a model's directory (default: the demo model)")
    arguments = parser.parse_args(argv)
    print(f"{'steps of':24}{'number':>8}{'error: median':>16}{'p90':>8}{'bias':>8}")
    with tempfile.TemporaryDirectory() as folder:
        log = arguments.step_log or Path(folder) / "steps.jsonl"
        if not log.exists():
            flags = {"threads": 1, "max_num_seqs": 32, "step_log": log, "speculative_config": "none"}
            with local_service(arguments.model, **flags) as target:
                asyncio.run(send(target, arguments.seconds))
        report(read_step_log(log).steps)


async def send(target: str, seconds: float) -> None:
    """Sends requests, more and fewer at a time."""
    async with GrpcCaller(ConnectionOptions(target)) as caller:
        for concurrency in CONCURRENCIES:
            load = RandomLoad(
                VOCAB_SIZE,
                ClosedLoop(concurrency),
                num_requests=None,
                prompt_tokens=Uniform(32, 512),
                output_tokens=Uniform(16, 128),
            )
            await run(load, caller, duration_s=seconds)


def report(steps: Sequence[LoggedStep]) -> None:
    """Prints a line for each kind of step."""
    model = StepTimeModel()
    ratios: list[tuple[LoggedStep, float]] = []
    for step in steps:
        predicted = model.predict(step.work, drafts=step.drafts)
        if predicted is not None and step.seconds > 0:
            ratios.append((step, predicted / step.seconds))
        model.observe(step.work, step.seconds, step.drafts, step.accepted)
    line("prompts", [ratio for step, ratio in ratios if step.chunks])
    for least, most in KINDS:
        name = f"{least} rows or more" if most == KINDS[-1][1] else f"{least} to {most} rows"
        line(name, [ratio for step, ratio in ratios if not step.chunks and least <= step.decodes <= most])


def line(name: str, ratios: Sequence[float]) -> None:
    """Prints one line of the table."""
    if ratios:
        errors = sorted(abs(ratio - 1) for ratio in ratios)
        print(
            f"{name:24}{len(errors):8}{median(errors):16.1%}{errors[len(errors) * 9 // 10]:8.1%}"
            f"{median(ratios) - 1:+8.1%}"
        )


if __name__ == "__main__":
    main()

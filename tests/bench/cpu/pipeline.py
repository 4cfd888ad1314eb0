"""Two stages with a core each, against one process with one core and with two: tokens per second, and idle stages.

The shape of Qwen3-0.6B with made-up weights. The scheduler and the workers are those of the service; requests come
from this process. Each way runs in turns. A stage is idle while its process uses no CPU: it has one compute thread.
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from cpu_bench.floors import write_config
from engines import EngineUnderTest
from waiting import until

from penstock.models.executor.group import WorkerGroup, new_executor
from penstock.models.executor.process import WorkerProcess
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.worker_config import WorkerConfig

TARGET = 1.6
VOCAB_SIZE = 150_000


@dataclass(frozen=True)
class Way:
    """One way to run the model."""

    name: str
    cores: tuple[int, ...]
    stages: int = 1


@dataclass(frozen=True)
class Round:
    """What one round gave."""

    tokens_per_s: float
    """Of output, with the prompts' time."""
    decoded_per_s: float
    """From the moment at which all requests have their first token."""
    idle: tuple[float, ...]
    """The share of the round's time in which each worker process used no CPU."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16], help="at a time (default: 1 4 16)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--output", type=int, default=64, help="tokens of each output (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--quantization", choices=["none", "int8", "int4"], default="none")
    arguments = parser.parse_args(argv)
    first, second, *_ = sorted(os.sched_getaffinity(0))
    ways = [Way("one core", (first,)), Way("two cores", (first, second)), Way("two stages", (first, second), 2)]
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder))
        rounds = asyncio.run(measure(ways, Path(folder), arguments))
    report(ways, rounds, arguments.rows)


async def measure(
    ways: Sequence[Way], folder: Path, arguments: argparse.Namespace
) -> dict[tuple[str, int], list[Round]]:
    """Runs every way and every number of rows in each round."""
    rounds: dict[tuple[str, int], list[Round]] = {}
    for _ in range(arguments.rounds):
        for way in ways:
            async with started(way, folder, arguments.quantization) as (engine, pids):
                await one_round(engine, pids, 2, arguments.prompt, 8)
                for rows in arguments.rows:
                    found = await one_round(engine, pids, rows, arguments.prompt, arguments.output)
                    rounds.setdefault((way.name, rows), []).append(found)
    return rounds


@asynccontextmanager
async def started(way: Way, folder: Path, quantization: str) -> AsyncIterator[tuple[EngineUnderTest, list[int]]]:
    """An engine with its workers, and their process ids."""
    config = WorkerConfig(
        model=str(folder), backend="cpu", load_format="dummy", quantization=quantization, num_threads=len(way.cores),
        thread_cpus=tuple((core,) for core in way.cores), kv_cache_bytes=1 << 30, max_model_len=2048,
        pipeline_parallel_size=way.stages,
    )  # fmt: skip
    executor = new_executor(config)
    engine = Engine(executor, SchedulerConfig())
    try:
        facts = await engine.start()
        if facts.stage_layers:
            print(f"the stages have {' and '.join(map(str, facts.stage_layers))} layers", flush=True)
        workers = executor._workers if isinstance(executor, WorkerGroup) else [executor]
        yield EngineUnderTest(engine), [worker.pid for worker in workers if isinstance(worker, WorkerProcess)]
    finally:
        await engine.stop()


async def one_round(engine: EngineUnderTest, pids: list[int], rows: int, prompt: int, output: int) -> Round:
    """Runs ``rows`` requests at once."""
    rng = random.Random(rows)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(prompt)] for _ in range(rows)]
    busy = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
    began = time.perf_counter()
    answers = [engine.submit(ids, SamplingParams(temperature=0.0), output, tenant=str(began)) for ids in prompts]
    await until(lambda: all(answer.token_ids for answer in answers))
    all_began, tokens = time.perf_counter(), sum(len(answer.token_ids) for answer in answers)
    await engine.finish(answers)
    ended = time.perf_counter()
    used = [sum(psutil.Process(pid).cpu_times()[:2]) - before for pid, before in zip(pids, busy, strict=True)]
    return Round(
        rows * output / (ended - began),
        (rows * output - tokens) / (ended - all_began),
        tuple(max(0.0, 1 - seconds / (ended - began)) for seconds in used),
    )


def report(ways: Sequence[Way], rounds: dict[tuple[str, int], list[Round]], numbers: Sequence[int]) -> None:
    """Prints medians, and ratios to one core."""
    print(f"{'rows':>5}  {'':12}{'tokens/s':>10}{'of one core':>13}{'decoding':>10}{'of one core':>13}  idle")
    for rows in numbers:
        base = rounds[ways[0].name, rows]
        for way in ways:
            found = rounds[way.name, rows]
            whole, decoded = ([getattr(one, name) for one in found] for name in ("tokens_per_s", "decoded_per_s"))
            ratios = [
                statistics.median(
                    getattr(one, name) / getattr(other, name) for one, other in zip(found, base, strict=True)
                )
                for name in ("tokens_per_s", "decoded_per_s")
            ]
            idle = ", ".join(
                f"{statistics.median(each):.0%}" for each in zip(*(one.idle for one in found), strict=True)
            )
            print(
                f"{rows:5}  {way.name:12}{statistics.median(whole):10.1f}{ratios[0]:13.2f}"
                f"{statistics.median(decoded):10.1f}{ratios[1]:13.2f}  {idle}"
            )
    print(f"wanted of two stages at 16 rows: {TARGET} times one core")


if __name__ == "__main__":
    main()

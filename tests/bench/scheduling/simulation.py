"""How well a simulation that was fitted to one run predicts others, and how fast it is.

Serves a model with a step log, sends a trace with `penstock bench`, and predicts other runs with `penstock simulate`
before they are made: at another rate, with longer prompts, with another token budget, and in a closed loop. Then 10,000
requests are simulated. Service and client have a core that a worker does not compute on.

First with a device of constant speed: the real service, over a worker that only sleeps, so that other programs on the
machine hardly matter. Then with a real worker on the CPU, whose model has the demo's shape, larger, with made-up
weights: the demo's own steps take less time than messages on their way. The pace of a run is the median time of its
steps by what the fit predicts for their work: how much slower or faster the machine was than in the fitted run.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

import tokenizers

from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.plan import AdapterLoad, AdapterLoaded, StepPlan, StepResult
from penstock.scheduler.simulation.costs import SimulatedCosts, StepCosts
from penstock.scheduler.simulation.fit import fit_costs
from penstock.scheduler.simulation.step_log import read_step_log
from penstock.scheduler.simulation.worker import SimulatedWorker
from penstock.scheduler.worker_config import WorkerFacts
from penstock.service.app.embedded import local_service
from penstock.service.app.serve import logged
from penstock.service.app.server import Server
from penstock.service.app.server_config import ServerConfig
from penstock.service.text.tokenizer import Tokenizer

PENSTOCK = Path(sys.executable).with_name("penstock")
TARGET = 0.15
WANTED_SPEED = 50
NUM_MANY = 10_000
SLEEPING = StepCosts(
    constant=8e-3, prefill_tokens=1e-4, prefill_kv=5e-8, decodes=2e-4, decode_kv=3e-7, chunks=1e-3, chunk_kv=1e-6
)
Service = Callable[..., AbstractContextManager[str]]
FIGURES = ("requests/s", "tokens/s", "ttft p50", "itl p50", "tpot p50", "e2e p50")


@dataclass(frozen=True)
class Run:
    """One run: its requests, and what is changed in the service."""

    name: str
    rate: float
    prompt_tokens: tuple[int, int] = (50, 400)
    concurrency: int | None = None
    """None: at the times of the trace."""
    token_budget: int | None = None

    @property
    def arrivals(self) -> list[str]:
        return [] if self.concurrency is None else [f"--concurrency={self.concurrency}"]

    @property
    def limits(self) -> dict[str, int]:
        return {} if self.token_budget is None else {"max_num_batched_tokens": self.token_budget}

    def trace(self, path: Path, number: int, seed: int) -> Path:
        """Writes its requests."""
        rng, when = random.Random(seed), 0.0
        with path.open("w") as file:
            for _ in range(number):
                when += rng.expovariate(self.rate)
                request = {
                    "arrival_s": round(when, 6),
                    "prompt_tokens": rng.randint(*self.prompt_tokens),
                    "max_tokens": rng.randint(16, 96),
                }
                file.write(json.dumps(request) + "\n")
        return path


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rate",
        type=float,
        default=5.0,
        help="requests per second of the fitted run, 0.6 times as many on the CPU (default: 5)",
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals in each run (default: 40)")
    parser.add_argument("--model", help="a model's directory, or demo (default: the demo's shape, larger)")
    parser.add_argument("--only", choices=("sleeping", "cpu"), help="one of the two workers (default: both)")
    parser.add_argument("--keep", type=Path, help="a folder for the traces, logs and results (default: none is kept)")
    parser.add_argument("--serve", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve is not None:
        asyncio.run(serve_sleeping(**json.loads(options.serve)))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) if options.keep is None else options.keep
        if options.only != "cpu":
            print("a worker that sleeps\n")
            compare(folder / "sleeping", options.rate, options.seconds, sleeping_service)
        if options.only != "sleeping":
            # Each run must leave a core some room: near its limit, a small error makes a queue much longer.
            rate = 0.6 * options.rate
            flags = [options.model] if options.model else [str(write_large_model(Path(made))), "--load-format=dummy"]
            print("a worker on the CPU\n")
            compare(folder / "cpu", rate, options.seconds, lambda log, **limits: cpu_service(flags, log, **limits))


def compare(folder: Path, rate: float, seconds: float, service: Service) -> None:
    """Fits to one run, and prints what is predicted of others beside what is measured."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [
        Run("fitted", rate),
        Run("rate", 1.5 * rate),
        Run("prompts", rate, prompt_tokens=(300, 700)),
        Run("budget", rate, token_budget=64),
        Run("closed loop", rate, concurrency=16),
    ]
    fitted = folder / "fitted steps.jsonl"
    for seed, run in enumerate(runs):
        trace = run.trace(folder / f"{run.name}.jsonl", round(run.rate * seconds), seed)
        predicted = simulated(folder, run, trace, fitted) if seed else {}  # before it is known
        log = folder / f"{run.name} steps.jsonl"
        measured = send(folder, run, trace, service(log, **run.limits))
        predicted = predicted or simulated(folder, run, trace, fitted)
        print("\n".join(table(run, predicted, measured, pace(fitted, log))), flush=True)
    print(f"error: predicted / measured - 1; wanted: at most {TARGET:.0%} in each")
    many(folder, runs[0], fitted)


def write_large_model(folder: Path) -> Path:
    """The demo's shape, larger: about 70 MB in bfloat16."""
    directory = folder / "large"
    shutil.copytree(resolve_model(DEMO), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 8}
    config |= {**sizes, "layer_types": ["full_attention"] * 8}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def cpu_service(flags: Sequence[str], log: Path, **limits: int) -> AbstractContextManager[str]:
    """`penstock serve`, which leaves a core to the client; yields its target."""
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    written = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
    return local_service(*flags, *written, threads=threads, step_log=log, speculative_config="none")


@contextmanager
def sleeping_service(log: Path, max_num_batched_tokens: int = 256) -> Iterator[str]:
    """A service over a worker that sleeps, in a process of its own; yields its target."""
    given = json.dumps({"log": str(log), "max_num_batched_tokens": max_num_batched_tokens})
    command = [sys.executable, "-P", __file__, "--serve", given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


async def serve_sleeping(log: str, max_num_batched_tokens: int) -> None:
    """Serves until SIGTERM, and prints the target."""
    limits = SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens)
    with tempfile.TemporaryDirectory() as folder:
        server_config = ServerConfig("sleeping", "127.0.0.1:0", scheduler=limits, step_log=Path(log))
        engine = Engine(logged(SleepingExecutor(max_num_batched_tokens), server_config), limits)
        tokenizer = byte_tokenizer(Path(folder))
        server = Server(server_config, engine, lambda: tokenizer)
        await server.run(lambda address: print(address, flush=True))


class SleepingExecutor:
    """Takes the time of ``SLEEPING`` for each step, in a thread of its own."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._facts = WorkerFacts(
            10_000, 16, 256, 4096, 256, max_num_batched_tokens, "sleeping", "none", "cpu", "float32", "float32", 0, 0
        )
        self._worker = SimulatedWorker(SimulatedCosts(SLEEPING))
        self._plans: SimpleQueue[StepPlan] = SimpleQueue()
        self._results: asyncio.Queue[StepResult] = asyncio.Queue()

    async def load_adapter(self, load: AdapterLoad) -> AdapterLoaded:
        """Never called: it has no slots."""
        raise AssertionError(load)

    async def start(self) -> WorkerFacts:
        """Starts the thread."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), daemon=True).start()
        return self._facts

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        done = time.monotonic()
        while True:
            waits = self._plans.empty()
            plan = self._plans.get()
            began = time.monotonic() if waits else done
            result = self._worker.run(plan)
            time.sleep(max(0.0, began + result.computed_us * 1e-6 - time.monotonic()))
            result.waited_us = round(1e6 * (began - done))
            done = time.monotonic()
            result.computed_us = round(1e6 * (done - began))
            loop.call_soon_threadsafe(self._results.put_nowait, result)

    async def results(self) -> AsyncIterator[StepResult]:
        """Yields each result when its time has passed."""
        while True:
            yield await self._results.get()

    def kill(self, why: str) -> None:
        """Never called: no step takes long."""

    async def stop(self) -> None:
        """Nothing is left behind."""


def byte_tokenizer(directory: Path) -> Tokenizer:
    """A tokenizer with a token for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def send(folder: Path, run: Run, trace: Path, service: AbstractContextManager[str]) -> Mapping[str, Any]:
    """Measures a run; returns the summary."""
    report = folder / f"{run.name} measured.json"
    with service as target:
        command = [PENSTOCK, "bench", target, "--trace", trace, *run.arrivals, "--warmup=16", "--json", report]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return _summary(json.loads(report.read_text())["summary"])


def pace(fitted: Path, log: Path) -> float:
    """The median time of a run's steps by what the fit predicts for their work."""
    costs = fit_costs(read_step_log(fitted)).costs.step
    return median(step.seconds / costs.seconds(step.work, step.drafts) for step in read_step_log(log).steps)


def simulated(folder: Path, run: Run, trace: Path, log: Path) -> Mapping[str, Any]:
    """Simulates a run; returns the summary."""
    report = folder / f"{run.name} predicted.json"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in run.limits.items()]
    command = [PENSTOCK, "simulate", trace, "--step-log", log, *run.arrivals, *flags, "--json", report]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return _summary(json.loads(report.read_text())["runs"][0]["summary"])


def _summary(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    times = summary["times_s"]
    medians = [times[name]["p50"] * 1e3 for name in ("ttft", "itl", "tpot", "e2e")]
    values = [summary["requests_per_s"], summary["output_tokens_per_s"], *medians]
    return dict(zip(FIGURES, values, strict=True))


def table(run: Run, predicted: Mapping[str, float], measured: Mapping[str, float], pace: float) -> Iterator[str]:
    """The lines of a run."""
    low, high = run.prompt_tokens
    how = f"{run.rate:g}/s" if run.concurrency is None else f"{run.concurrency} at a time"
    budget = "" if run.token_budget is None else f", steps of {run.token_budget} tokens"
    yield f"{run.name}: {how}, prompts of {low} to {high} tokens{budget}; pace {pace:.2f}"
    yield f"{'':10}" + "".join(f"{name:>12}" for name in FIGURES)
    for name, values in (("measured", measured), ("predicted", predicted)):
        yield f"{name:10}" + "".join(f"{values[figure]:12.2f}" for figure in FIGURES)
    yield f"{'error':10}" + "".join(f"{predicted[figure] / measured[figure] - 1:+12.1%}" for figure in FIGURES)
    yield ""


def many(folder: Path, run: Run, log: Path) -> None:
    """Simulates many requests."""
    trace = run.trace(folder / "many.jsonl", NUM_MANY, 99)
    began = time.perf_counter()
    report = folder / "many.json"
    command = [PENSTOCK, "simulate", trace, "--step-log", log, "--json", report]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    wall_s = time.perf_counter() - began
    summary = json.loads(report.read_text())["runs"][0]["summary"]
    seconds, inner_s = summary["seconds"], summary["wall_s"]
    print(
        f"{NUM_MANY:,} requests, which would run for {seconds:,.0f} s: simulated in {inner_s:.1f} s "
        f"({seconds / inner_s:,.0f}x), and {wall_s:.1f} s with start, trace and report ({seconds / wall_s:,.0f}x); "
        f"wanted: at least {WANTED_SPEED}x"
    )


if __name__ == "__main__":
    main()

"""How well a simulation that was fitted to one run predicts others, and how fast it is.

Serves the demo model with `penstock serve --step-log`, sends a trace with `penstock bench`, and predicts other runs
with `penstock simulate` before they are made: at another rate, with longer prompts, with another token budget, and in a
closed loop. Then 10,000 requests are simulated. Service, worker and client share the machine's cores.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.service.app.embedded import local_service

PENSTOCK = Path(sys.executable).with_name("penstock")
TARGET = 0.15
WANTED_SPEED = 50
NUM_MANY = 10_000
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
    def limits(self) -> dict[str, object]:
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
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second of the fitted run (default: 6)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals in each run (default: 40)")
    parser.add_argument("--model", default="demo", help="a model's directory (default: the demo model)")
    parser.add_argument("--keep", type=Path, help="a folder for the traces, logs and results (default: none is kept)")
    options = parser.parse_args(argv)
    rate = options.rate
    runs = [
        Run("fitted", rate),
        Run("rate", 1.5 * rate),
        Run("prompts", rate, prompt_tokens=(300, 700)),
        Run("budget", rate, token_budget=64),
        Run("closed loop", rate, concurrency=16),
    ]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) if options.keep is None else options.keep
        folder.mkdir(exist_ok=True)
        log = folder / "steps.jsonl"
        for seed, run in enumerate(runs):
            trace = run.trace(folder / f"{run.name}.jsonl", round(run.rate * options.seconds), seed)
            is_fitted = run is runs[0]
            if not is_fitted:
                predicted = simulated(folder, run, trace, log)  # before it is known
            measured = served(folder, run, trace, options.model, log if is_fitted else None)
            if is_fitted:
                predicted = simulated(folder, run, trace, log)
            print("\n".join(table(run, predicted, measured)), flush=True)
        print(f"error: predicted / measured - 1; wanted: at most {TARGET:.0%} in each")
        many(folder, runs[0], log)


def served(folder: Path, run: Run, trace: Path, model: str, log: Path | None) -> Mapping[str, Any]:
    """Serves and measures a run; returns the summary."""
    report = folder / f"{run.name} measured.json"
    flags = {**run.limits, **({} if log is None else {"step_log": log})}
    with local_service(model, **flags) as target:
        command = [PENSTOCK, "bench", target, "--trace", trace, *run.arrivals, "--warmup=16", "--json", report]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return _summary(json.loads(report.read_text())["summary"])


def simulated(folder: Path, run: Run, trace: Path, log: Path) -> Mapping[str, Any]:
    """Simulates a run; returns the summary."""
    report = folder / f"{run.name} predicted.json"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in run.limits.items()]
    command = [PENSTOCK, "simulate", trace, "--step-log", log, *run.arrivals, *flags, "--json", report]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return _summary(json.loads(report.read_text())["runs"][0]["summary"])


def _summary(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    times = summary["times_s"]
    medians = [times[name]["p50"] * 1e3 for name in ("ttft", "itl", "tpot", "e2e")]
    values = [summary["requests_per_s"], summary["output_tokens_per_s"], *medians]
    return dict(zip(FIGURES, values, strict=True))


def table(run: Run, predicted: Mapping[str, float], measured: Mapping[str, float]) -> Iterator[str]:
    """The lines of a run."""
    low, high = run.prompt_tokens
    how = f"{run.rate:g}/s" if run.concurrency is None else f"{run.concurrency} at a time"
    budget = "" if run.token_budget is None else f", steps of {run.token_budget} tokens"
    yield f"{run.name}: {how}, prompts of {low} to {high} tokens{budget}"
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
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
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

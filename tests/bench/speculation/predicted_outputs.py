"""The speedup from `prediction`: requests with a right or wrong predicted output, and the same requests without one.

Uses the demo model's function in 1.2 GB of weights, so that a step costs as much as a real model's. One request runs at
a time. Each round has a new prompt and runs it in every way, in rotating order: without a prediction, with a text that
is 95 % right (words of the output are replaced, left out and added), with the right text, and with an entirely wrong
one, which is another prompt's output. All runs of a round use the same seed, and must give the same tokens. Reports
medians over the rounds. Also reports the CPU time of the service's processes, which depends less on other load on the
machine.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from spec_bench.widen import widen
from spec_bench.workloads import texts

from penstock.clients import AsyncClient, Completion
from penstock.service.app.embedded import local_service

WRONG_SHARE = 0.05
"""The share of the words that differ."""
TARGETS = {"95 % right": 2.5, "wrong": 0.97}
WAYS = ("none", "95 % right", "right", "wrong")


class Turn(NamedTuple):
    """One request."""

    way: str
    seconds: float
    cpu_s: float
    completion: Completion


def edited(text: str, rng: random.Random) -> str:
    """Returns the text with some words replaced by others from it, left out, or added."""
    words = text.split(" ")
    parts = []
    for word in words:
        kind = rng.choice(("replaced", "left out", "added")) if rng.random() < WRONG_SHARE else "right"
        if kind in ("replaced", "added"):
            parts.append(rng.choice(words))
        if kind in ("right", "added"):
            parts.append(word)
    return " ".join(parts)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="(default: 6)")
    parser.add_argument(
        "--seconds", type=float, default=900.0, metavar="S", help="start no round after this time (default: 900)"
    )
    parser.add_argument("--output-tokens", type=int, default=192, metavar="N", help="per request (default: 192)")
    parser.add_argument("--ways", nargs="+", choices=WAYS[1:], default=WAYS[1:])
    parser.add_argument("--wide", type=Path, metavar="FOLDER", help="folder of the wide model (default: create one)")
    parser.add_argument("--flags", nargs="+", default=[], metavar="NAME=VALUE", help="of the service")
    arguments = parser.parse_args()
    flags = dict(flag.split("=", 1) for flag in arguments.flags)
    with model(arguments.wide) as path, local_service(path, **flags) as target:
        rounds = asyncio.run(measure(target, arguments))
    report(rounds, arguments)


@contextlib.contextmanager
def model(wide: Path | None) -> Iterator[str]:
    """What to serve."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) if wide is None else wide
        if not (path / "model.safetensors").exists():
            widen(path)
        yield str(path)


async def measure(target: str, arguments: argparse.Namespace) -> list[list[Turn]]:
    """Runs the rounds."""
    prompts = texts(arguments.rounds + 1)[1].prompts
    num_tokens = arguments.output_tokens
    rng = random.Random(0)
    rounds: list[list[Turn]] = []
    end = time.monotonic() + arguments.seconds
    async with AsyncClient(target) as client:
        # First generates all outputs, which also caches the prompts.
        known = await asyncio.gather(*(complete(client, prompt, at, num_tokens) for at, prompt in enumerate(prompts)))
        for number, prompt in enumerate(prompts[:-1]):
            if rounds and time.monotonic() > end:
                break
            text = known[number].text
            predictions = {"right": text, "95 % right": edited(text, rng), "wrong": known[number + 1].text}
            ways = ["none", *arguments.ways]
            ways = ways[number % len(ways) :] + ways[: number % len(ways)]
            turns = [await turn(client, way, prompt, number, num_tokens, predictions.get(way)) for way in ways]
            for one in turns:
                assert one.completion.token_ids == known[number].token_ids, f"round {number + 1}, {one.way}"
            rounds.append(turns)
    return rounds


async def turn(
    client: AsyncClient, way: str, prompt: str, seed: int, output_tokens: int, prediction: str | None
) -> Turn:
    """Runs one request to its end."""
    began, cpu_before = time.perf_counter(), cpu_s()
    completion = await complete(client, prompt, seed, output_tokens, prediction)
    seconds, taken = time.perf_counter() - began, cpu_s() - cpu_before
    told = completion.speculation
    drafts = f"{told.accepted_tokens} of {told.drafted_tokens} drafts in {told.steps} steps" if told else "no drafts"
    print(f"{seed + 1:3} {way:12}{seconds:7.2f} s, {taken:6.2f} s of the CPU  {drafts}", flush=True)
    return Turn(way, seconds, taken, completion)


async def complete(
    client: AsyncClient, prompt: str, seed: int, output_tokens: int, prediction: str | None = None
) -> Completion:
    """Samples, so that the model does not repeat itself."""
    return await client.complete(
        prompt, max_tokens=output_tokens, temperature=1.0, seed=seed, ignore_eos=True, prediction=prediction
    )


def cpu_s() -> float:
    """Returns the CPU time that this process's children have used so far."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def report(rounds: Sequence[Sequence[Turn]], arguments: argparse.Namespace) -> None:
    """The table."""
    ratios: dict[str, list[float]] = defaultdict(list)
    of_cpu: dict[str, list[float]] = defaultdict(list)
    for turns in rounds:
        [plain] = [one for one in turns if one.way == "none"]
        for one in turns:
            ratios[one.way].append(plain.seconds / one.seconds)
            of_cpu[one.way].append(plain.cpu_s / one.cpu_s)
    plain_s = statistics.median(one.seconds for turns in rounds for one in turns if one.way == "none")
    print(f"{len(rounds)} rounds of {arguments.output_tokens} tokens; without a prediction: "
          f"{arguments.output_tokens / plain_s:,.1f} tokens/s")  # fmt: skip
    for way in arguments.ways:
        wanted = f"; wanted: {TARGETS[way]:g}" if way in TARGETS else ""
        print(f"prediction {way:12} {_summary(ratios[way])}{wanted}")
        print(f"{'by CPU time':23} {_summary(of_cpu[way])}")


def _summary(ratios: Sequence[float]) -> str:
    low, high = interval(ratios)
    return (
        f"{statistics.median(ratios):.2f} times as fast, 95 % interval {low:.2f} to {high:.2f}, "
        f"{min(ratios):.2f} to {max(ratios):.2f} over the rounds"
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the confidence interval of the median, by bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


if __name__ == "__main__":
    main()

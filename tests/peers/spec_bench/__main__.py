"""Measures what speculative decoding gains, on the CPU, through the service: tokens a second against none.

    make bench-spec                                        two targets, all drafters, 1 and 16 requests; about an hour
    make bench-spec ARGS='--targets demo --repetitions 5'
    make bench-spec ARGS='--methods ngram --concurrency 1'

The targets are the demo model, and the same function in 1.2 GB of weights, so that drafts are accepted as often and a
step costs what a real model's does. Each repetition starts the service once for each drafter, by turns, and sends it
the same requests; what it answers must be the same tokens. A figure is only as good as the quiet around it: run nothing
else meanwhile. Fails if an answer differs, never because of a figure.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from cpu_bench.runners.penstock_service import service

from penstock.clients import AsyncClient, Delta, Finished
from penstock.models.checkpoint import DEMO, DEMO_DRAFTERS, resolve_model
from spec_bench.widen import widen
from spec_bench.workloads import Text, texts

NONE = "none"
MODELS = dict(zip(("draft_model", "eagle3"), DEMO_DRAFTERS, strict=True))
"""Of methods with weights."""
METHODS = ("ngram", "suffix", *MODELS)
TARGETS = ("demo", "wide")


@dataclass
class Measured:
    """One set of requests."""

    target: str
    text: str
    concurrency: int
    method: str
    repetition: int
    tokens_per_s: float
    drafted: int
    accepted: int
    steps: int
    """That had drafts."""


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="the folder where the wide model goes")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 16], metavar="N")
    parser.add_argument("--max-drafts", type=int, default=8, metavar="K", help="num_speculative_tokens (default: 8)")
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N", help="of a request (default: 128)")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where each set is told, a line of JSON each")
    arguments = parser.parse_args()
    print(time.strftime("%Y-%m-%d %H:%M"), flush=True)
    bench = Bench(arguments)
    for target in arguments.targets:
        for repetition in range(arguments.repetitions):
            for method in (NONE, *arguments.methods):
                bench.run(target, method, repetition)
    print()
    print(table(bench.measured))
    for line in bench.differing:
        print(f"DIFFERS: {line}", file=sys.stderr)
    return 1 if bench.differing else 0


class Bench:
    """What was measured, and what was answered first."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._answers: dict[tuple[str, str, int, int], list[int]] = {}
        self.measured: list[Measured] = []
        self.differing: list[str] = []

    def run(self, target: str, method: str, repetition: int) -> None:
        """Starts the service, sends it every set."""
        model, flags = self._model(target), []
        if method != NONE:
            config = {"method": method, "num_speculative_tokens": self._arguments.max_drafts}
            if method in MODELS:
                config["model"] = MODELS[method]
            flags = ["--speculative-config", json.dumps(config)]
        with TemporaryDirectory() as folder, service(str(model), folder, flags) as (_, address, _, _):
            for concurrency in self._arguments.concurrency:
                for text in texts(max(2, concurrency)):
                    self._take(asyncio.run(self._send(address, text, concurrency)), target, method, repetition)

    def _model(self, target: str) -> Path:
        if target == "demo":
            return resolve_model(DEMO)
        folder: Path = self._arguments.peers.absolute() / "models" / "demo-wide"
        if not (folder / "model.safetensors").exists():
            print(f"the wide model: {widen(folder) / 1e9:.2f} GB", flush=True)
        return folder

    async def _send(self, address: str, text: Text, concurrency: int) -> "Answered":
        """As many requests at once, until all prompts are through."""
        limit = asyncio.Semaphore(concurrency)
        async with AsyncClient(address) as client:
            await client.complete(text.prompts[0], max_tokens=4, temperature=0.0)

            async def one(index: int, prompt: str) -> tuple[list[int], Finished]:
                async with limit:
                    return await self._one(client, prompt, text.temperature, index)

            began = time.perf_counter()
            answers = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(text.prompts)))
            return Answered(text, concurrency, time.perf_counter() - began, answers)

    async def _one(self, client: AsyncClient, prompt: str, temperature: float, seed: int) -> tuple[list[int], Finished]:
        token_ids: list[int] = []
        call = client.generate(
            prompt,
            max_tokens=self._arguments.output_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=True,
            format="token_ids",
        )
        async for event in call:
            if isinstance(event, Delta):
                token_ids += event.token_ids
            elif isinstance(event, Finished):
                return token_ids, event
        raise AssertionError("a stream ended without its last event")

    def _take(self, answered: "Answered", target: str, method: str, repetition: int) -> None:
        text, concurrency = answered.text.name, answered.concurrency
        for index, (token_ids, _) in enumerate(answered.answers):
            expected = self._answers.setdefault((target, text, concurrency, index), token_ids)
            if token_ids != expected:
                self.differing.append(f"{target}, {text}, {concurrency} at once, prompt {index}, {method}")
        told = [finished.speculation for _, finished in answered.answers if finished.speculation is not None]
        measured = Measured(
            target,
            text,
            concurrency,
            method,
            repetition,
            sum(len(token_ids) for token_ids, _ in answered.answers) / answered.seconds,
            sum(one.drafted_tokens for one in told),
            sum(one.accepted_tokens for one in told),
            sum(one.steps for one in told),
        )
        self.measured.append(measured)
        if self._arguments.json is not None:
            with self._arguments.json.open("a") as file:
                file.write(json.dumps(asdict(measured)) + "\n")
        print(
            f"{target} {text} {concurrency} at once, {repetition + 1}, {method}: "
            f"{measured.tokens_per_s:,.1f} tokens/s, "
            f"{measured.accepted} of {measured.drafted} drafts accepted in {measured.steps} steps",
            flush=True,
        )


@dataclass(frozen=True)
class Answered:
    """A set of requests, and what came."""

    text: Text
    concurrency: int
    seconds: float
    answers: Sequence[tuple[list[int], Finished]]


def table(measured: Sequence[Measured]) -> str:
    """Medians over the repetitions; ratios are medians of those against none in the same repetition."""
    by_set: dict[tuple[str, str, int, str], dict[int, Measured]] = defaultdict(dict)
    for one in measured:
        by_set[one.target, one.text, one.concurrency, one.method][one.repetition] = one
    heads = ("target", "text", "at once", "drafts from", "tokens/s", "ratio", "tokens a step with drafts")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (target, text, concurrency, method), runs in sorted(by_set.items(), key=lambda item: item[0][:3]):
        plain = by_set[target, text, concurrency, NONE]
        ratio = median(run.tokens_per_s / plain[number].tokens_per_s for number, run in runs.items())
        steps = sum(run.steps for run in runs.values())
        length = f"{1 + sum(run.accepted for run in runs.values()) / steps:.2f}" if steps else ""
        rate = median(run.tokens_per_s for run in runs.values())
        lines.append(f"| {target} | {text} | {concurrency} | {method} | {rate:,.1f} | {ratio:.2f} | {length} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

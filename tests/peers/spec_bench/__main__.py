"""Measures what speculative decoding gains, on the CPU, through the service: tokens a second against none.

    make bench-spec                                        two targets, all drafters, 1 and 16 requests; half an hour
    make bench-spec ARGS='--targets demo --repetitions 5'
    make bench-spec ARGS='--methods ngram --concurrency 1'

The targets are the demo model, and the same function in 1.2 GB of weights, so that drafts are accepted as often and a
step costs what a real model's does. A service for each drafter, and one without, all run; one of them at a time is sent
some requests, of which so many run at once, and then the next one the same. What they answer must be the same tokens. A
figure is only as good as the quiet around it: run nothing else meanwhile. Fails if an answer differs, never because of
a figure.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from cpu_bench.runners.penstock_service import service

from penstock.clients import AsyncClient, Delta, Finished
from penstock.models.checkpoint.checkpoint import DEMO, DEMO_DRAFTERS, resolve_model
from spec_bench.widen import widen
from spec_bench.workloads import texts

NONE = "none"
MODELS = dict(zip(("draft_model", "eagle3"), DEMO_DRAFTERS, strict=True))
"""Of methods with weights."""
METHODS = ("ngram", "suffix", *MODELS)
TURNS = {"demo": 4, "wide": 1}
"""In a repetition, of the targets."""
REQUESTS = {1: 4, 16: 3}
"""Of a turn, times as many as run at once: so that most of its time so many do."""


class Set(NamedTuple):
    """Requests that are sent to a service in a turn."""

    target: str
    text: str
    concurrency: int
    method: str
    turn: int


@dataclass
class Measured:
    """What came of them."""

    target: str
    text: str
    concurrency: int
    method: str
    turn: int
    seconds: float
    tokens: int
    drafted: int
    accepted: int
    steps: int
    """That had drafts."""


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="the folder where the wide model goes")
    parser.add_argument("--targets", nargs="+", choices=TURNS, default=list(TURNS))
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
        bench.run(target)
    print()
    print(table(bench.measured))
    for line in bench.differing:
        print(f"DIFFERS: {line}", file=sys.stderr)
    return 1 if bench.differing else 0


class Bench:
    """What was measured, and what was answered first."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._answers: dict[tuple[str, str, int, int, int], list[int]] = {}
        self.measured: list[Measured] = []
        self.differing: list[str] = []

    def run(self, target: str) -> None:
        """Starts the services, and sends them every set by turns."""
        model = self._model(target)
        with ExitStack() as stack:
            addresses = {}
            for method in (NONE, *self._arguments.methods):
                folder = stack.enter_context(TemporaryDirectory())
                _, addresses[method], _, _ = stack.enter_context(service(str(model), folder, self._flags(method)))
            num_asked = 0
            for repetition in range(self._arguments.repetitions):
                for concurrency in self._arguments.concurrency:
                    turns, number = TURNS[target], REQUESTS.get(concurrency, 3) * concurrency
                    for text in texts(turns * number, num_asked):
                        for turn in range(turns):
                            prompts = text.prompts[turn * number :][:number]
                            which = Set(target, text.name, concurrency, NONE, repetition * turns + turn)
                            self._take_turn(addresses, which, prompts, text.temperature)
                    num_asked += turns * number

    def _take_turn(self, addresses: dict[str, str], which: Set, prompts: Sequence[str], temperature: float) -> None:
        """The same requests to each service, who begins in turn."""
        first = which.turn % len(addresses)
        methods = [*addresses][first:] + [*addresses][:first]
        for method in methods:
            answers, seconds = asyncio.run(self._send(addresses[method], prompts, temperature, which.concurrency))
            self._take(answers, seconds, which._replace(method=method))

    def _flags(self, method: str) -> list[str]:
        if method == NONE:
            return ["--speculative-config", NONE]
        config = {"method": method, "num_speculative_tokens": self._arguments.max_drafts}
        if method in MODELS:
            config["model"] = MODELS[method]
        return ["--speculative-config", json.dumps(config)]

    def _model(self, target: str) -> Path:
        if target == "demo":
            return resolve_model(DEMO)
        folder: Path = self._arguments.peers.absolute() / "models" / "demo-wide"
        if not (folder / "model.safetensors").exists():
            print(f"the wide model: {widen(folder) / 1e9:.2f} GB", flush=True)
        return folder

    async def _send(
        self, address: str, prompts: Sequence[str], temperature: float, concurrency: int
    ) -> "tuple[list[tuple[list[int], Finished]], float]":
        """So many at once, a new one when one ends; the answers, and the seconds until all were there."""
        turn = asyncio.Semaphore(concurrency)

        async def one(seed: int, prompt: str) -> tuple[list[int], Finished]:
            async with turn:
                return await self._one(client, prompt, temperature, seed)

        async with AsyncClient(address) as client:
            await client.complete("The", max_tokens=1)
            began = time.perf_counter()
            answers = await asyncio.gather(*(one(seed, prompt) for seed, prompt in enumerate(prompts)))
            return answers, time.perf_counter() - began

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

    def _take(self, answers: Sequence[tuple[list[int], Finished]], seconds: float, which: Set) -> None:
        target, text, concurrency, method, turn = which
        for index, (token_ids, _) in enumerate(answers):
            expected = self._answers.setdefault((target, text, concurrency, turn, index), token_ids)
            if token_ids != expected:
                self.differing.append(f"{target}, {text}, {concurrency} at once, turn {turn + 1}, {index}, {method}")
        told = [finished.speculation for _, finished in answers if finished.speculation is not None]
        measured = Measured(
            *which,
            seconds,
            sum(len(token_ids) for token_ids, _ in answers),
            sum(one.drafted_tokens for one in told),
            sum(one.accepted_tokens for one in told),
            sum(one.steps for one in told),
        )
        self.measured.append(measured)
        if self._arguments.json is not None:
            with self._arguments.json.open("a") as file:
                file.write(json.dumps(asdict(measured)) + "\n")
        print(
            f"{target} {text} {concurrency} at once, {turn + 1}, {method}: {measured.tokens / seconds:,.1f} tokens/s, "
            f"{measured.accepted} of {measured.drafted} drafts accepted in {measured.steps} steps",
            flush=True,
        )


def table(measured: Sequence[Measured]) -> str:
    """Of all turns together: tokens over seconds, and the seconds without drafts over those with."""
    by_set: dict[tuple[str, str, int, str], list[Measured]] = defaultdict(list)
    for one in measured:
        by_set[one.target, one.text, one.concurrency, one.method].append(one)
    heads = (
        "target",
        "text",
        "at once",
        "drafts from",
        "tokens/s",
        "ratio",
        "of the turns",
        "tokens a step with drafts",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (target, text, concurrency, method), turns in sorted(by_set.items(), key=lambda item: item[0][:3]):
        plain = {one.turn: one.seconds for one in by_set[target, text, concurrency, NONE]}
        seconds, steps = sum(one.seconds for one in turns), sum(one.steps for one in turns)
        ratios = [plain[one.turn] / one.seconds for one in turns]
        length = f"{1 + sum(one.accepted for one in turns) / steps:.2f}" if steps else ""
        rate = sum(one.tokens for one in turns) / seconds
        lines.append(
            f"| {target} | {text} | {concurrency} | {method} | {rate:,.1f} | {sum(plain.values()) / seconds:.2f} | "
            f"{min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f} | {length} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

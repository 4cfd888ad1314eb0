"""What drafting by default costs on prose and gains on repetition, compared with `--speculative-config none`.

Two services run on each model. Each pair of turns sends the same requests first to one, then to the other, alternating
which comes first. Prompts are cached before, so that a turn is nearly all decoding. Both services must give the same
tokens. The models are the demo model; M1, which has the shape of Qwen3-0.6B and random weights; and the demo model's
function in 1.2 GB of weights, so that it writes prose at the cost of a real model. M1 writes random tokens, or always
the same one greedily. Reports medians over the pairs, also by the CPU time of the services' processes, which depends
less on other load on the machine.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil
from cpu_bench.make_models import make_model
from cpu_bench.runners.penstock_service import service
from spec_bench.widen import widen
from spec_bench.workloads import Text, texts

from penstock.clients import AsyncClient, Completion

DEMO, M1, WIDE = "demo", "M1", "wide"
PAIRS = {DEMO: {1: 100, 4: 60, 16: 40}, M1: {1: 8, 4: 8, 16: 6}, WIDE: {1: 8, 4: 8, 16: 6}}
"""The number of pairs, by the number of rows."""
REPEATS = {DEMO: 3, M1: 1, WIDE: 1}
"""How often a pair is repeated. The fastest turn of each service counts, since its steps are so short."""
PROMPT_CHARS = 300
"""The limit on prompts of M1, whose tokens are short."""
TARGETS = {"prose": 0.99, "repetition": 2.5}


class Case(NamedTuple):
    """A kind of turn."""

    text: str
    num_rows: int


CASES = (Case("prose", 1), Case("prose", 4), Case("prose", 16), Case("repetition", 1))


class Service(NamedTuple):
    """A running service."""

    target: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """Returns the CPU time that its processes have used so far."""
        times = [process.cpu_times() for process in (self.process, *self.process.children(recursive=True))]
        return sum(each.user + each.system for each in times)


class Turn(NamedTuple):
    """What a turn took."""

    seconds: float
    cpu_s: float
    completions: list[Completion]

    @property
    def token_ids(self) -> list[list[int]]:
        """The outputs."""
        return [completion.token_ids for completion in self.completions]


def main() -> int:
    """Prints the figures; returns 1 if outputs differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--pairs", type=int, metavar="N", help="per case")
    parser.add_argument("--cases", nargs="+", type=_case, default=CASES, metavar="TEXT:N", help="such as prose:16")
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N", help="per request (default: 128)")
    parser.add_argument("--folder", type=Path, help="folder of M1 and the wide model (default: create them)")
    parser.add_argument("--flags", nargs="+", default=[], metavar="NAME=VALUE", help="of both services")
    parser.add_argument("--other", default="none", metavar="VALUE", help="speculative-config to compare with")
    arguments = parser.parse_args()
    num_differing = 0
    with ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(TemporaryDirectory()))
        for name in arguments.models:
            bench = Bench(name, arguments)
            for starts_first in (True, False):
                bench.run_session(_model(name, folder), starts_first)
            num_differing += bench.report()
    return 1 if num_differing else 0


def _case(text: str) -> Case:
    name, _, number = text.partition(":")
    return Case(name, int(number))


def _model(name: str, folder: Path) -> str:
    if name == DEMO:
        return DEMO
    path = folder / name
    if not (path / "model.safetensors").exists():
        make_model(name, path) if name == M1 else widen(path)
    return str(path)


@contextmanager
def started(model: str, flags: Sequence[str]) -> Iterator[Service]:
    """Starts a service."""
    with TemporaryDirectory() as folder, service(model, folder, flags) as (process, target, _, _):
        yield Service(target, psutil.Process(process.pid))


class Bench:
    """Compares two services of one model."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self._name = name
        self._arguments = arguments
        self._pairs: dict[Case, list[tuple[Turn, Turn]]] = {case: [] for case in arguments.cases}
        """By case, the turns of the default service and of the other."""

    def run_session(self, model: str, starts_first: bool) -> None:
        """Runs half of the pairs of each case. ``starts_first``: the default service is the first to start, and so to
        get memory."""
        flags = ["--log-level", "warning", *(f"--{flag}" for flag in self._arguments.flags)]
        variants = [flags, [*flags, "--speculative-config", self._arguments.other]]
        with ExitStack() as stack:
            services = [stack.enter_context(started(model, each)) for each in variants[:: 1 if starts_first else -1]]
            for case in self._arguments.cases:
                asyncio.run(self._run_case(case, services[:: 1 if starts_first else -1]))

    async def _run_case(self, case: Case, services: Sequence[Service]) -> None:
        number, num_pairs = case.num_rows, self._arguments.pairs or PAIRS[self._name][case.num_rows]
        [text] = [text for text in texts(number * num_pairs) if text.name == case.text]
        done = len(self._pairs[case])
        for pair in range(done, done + num_pairs // 2):
            prompts = [self._prompt(prompt, case) for prompt in text.prompts[pair * number :][:number]]
            for each in services:
                await self._turn(each, prompts, text, max_tokens=1)
            turns: dict[Service, list[Turn]] = {each: [] for each in services}
            for repeat in range(REPEATS[self._name]):
                for each in services[:: 1 if (pair + repeat) % 2 else -1]:
                    turns[each].append(await self._turn(each, prompts, text))
            default, other = (min(turns[each], key=_seconds) for each in services)
            self._pairs[case].append((default, other))

    def report(self) -> int:
        """Prints the figures; returns in how many pairs the outputs differ."""
        num_differing = 0
        for (text, num_rows), pairs in self._pairs.items():
            num_differing += sum(default.token_ids != other.token_ids for default, other in pairs)
            drafts = [one.speculation for turn, _ in pairs for one in turn.completions if one.speculation is not None]
            cpu_ratio = sum(other.cpu_s for _, other in pairs) / sum(default.cpu_s for default, _ in pairs)
            print(
                f"{self._name:5}{text:11}{num_rows:2} rows: speed {_summary(pairs)}; wanted: {TARGETS[text]:g}; "
                f"by CPU time {cpu_ratio:.3f}; {sum(one.accepted_tokens for one in drafts)} of "
                f"{sum(one.drafted_tokens for one in drafts)} drafts accepted in {sum(one.steps for one in drafts)} "
                f"steps of {sum(len(ids) for turn, _ in pairs for ids in turn.token_ids)} tokens",
                flush=True,
            )
        if num_differing:
            print(f"{self._name}: outputs differ in {num_differing} pairs", file=sys.stderr)
        return num_differing

    def _prompt(self, prompt: str, case: Case) -> str:
        if self._name != M1:
            return prompt
        return prompt[:PROMPT_CHARS] if case.text == "prose" else 3 * prompt[: PROMPT_CHARS // 3]

    async def _turn(self, to: Service, prompts: Sequence[str], text: Text, max_tokens: int | None = None) -> Turn:
        """Sends the prompts at once."""
        most = max_tokens or self._arguments.output_tokens
        async with AsyncClient(to.target) as client:
            await client.complete("The", max_tokens=1)
            began, cpu_before = time.perf_counter(), to.cpu_s()
            completions = await asyncio.gather(
                *(
                    client.complete(prompt, max_tokens=most, temperature=text.temperature, seed=seed, ignore_eos=True)
                    for seed, prompt in enumerate(prompts)
                )
            )
            return Turn(time.perf_counter() - began, to.cpu_s() - cpu_before, completions)


def _seconds(turn: Turn) -> float:
    return turn.seconds


def _summary(pairs: Sequence[tuple[Turn, Turn]]) -> str:
    """Returns the median of the pairs' ratios, with its confidence interval by bootstrap, and the ratio of the sums."""
    ratios = [other.seconds / default.seconds for default, other in pairs]
    total = sum(other.seconds for _, other in pairs) / sum(default.seconds for default, _ in pairs)
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return f"{statistics.median(ratios):.3f} ({medians[50]:.3f} to {medians[-51]:.3f}; of the sums {total:.3f})"


if __name__ == "__main__":
    sys.exit(main())

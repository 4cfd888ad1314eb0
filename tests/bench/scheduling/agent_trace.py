"""Agents whose contexts do not fit in the KV cache together: `retain_mode: AUTO` and `Release` against plain LRU.

The published medians of an agent's run are 43 turns with 142,000 tokens in and 444 out. Tokens are divided by 64 for
the demo model, and times by 5. Each agent begins with a prompt, part of which all agents share, and then adds a tool
result in each turn. 95 % of its turns come within about 10 s of the last (2 s here), the others after a minute on
average. Some turns have a branch that is abandoned after a few turns, and every second one is accompanied by a request
that is never repeated. The KV cache holds a third of the tokens of the agents' contexts. Both ways run the same seeded
trace on a real service: `penstock serve` with the demo model, and its Python client.
"""

import argparse
import asyncio
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.clients import AsyncClient, Delta, Finished
from penstock.models.checkpoint.checkpoint import DEMO, check_checkpoint, resolve_model
from penstock.service.app.embedded import local_service

MAX_COMPUTED = 0.5
SCALE, TIME_SCALE = 64, 20.0
MEDIAN_TURNS, MEDIAN_PROMPT, OUTPUT = 43, 142_000 // SCALE, 444 // SCALE
FIRST_PROMPT, SHARED = 20_000 // SCALE, 12_000 // SCALE
NEW_TOKENS = (MEDIAN_PROMPT - FIRST_PROMPT) / (MEDIAN_TURNS / 2) - OUTPUT
"""The mean number of tokens that a turn adds, so that the median prompt is that of the published traces."""
PAUSE_S, PAUSE_SIGMA = 1.5, 0.9
"""The median and the spread of a pause, before scaling. Nineteen pauses in twenty are at most LONG_PAUSE_S."""
LONG_PAUSE_S, LONG_PAUSE_MEAN_S, LONG_PAUSES = 10.0, 60.0, 0.05
BRANCHES = 0.08
ONE_OFF_TOKENS = 1024
VOCAB = 4000
BLOCK = 16
HEADS = {
    "requests": 10,
    "prompt tokens": 16,
    "computed": 12,
    "share": 8,
    "TTFT p50, ms": 14,
    "TTFT p95, ms": 14,
    "s": 8,
}
"""The columns of the table, and their widths."""
WAYS: dict[str, dict[str, Any]] = {"plain LRU": {"retain_ms": 0}, "AUTO and Release": {"retain_mode": "auto"}}


@dataclass
class Turn:
    """One turn of an agent."""

    new_tokens: int
    pause_s: float
    """The pause after it."""
    branch: list[int]
    """The new tokens of each turn of a branch that is abandoned."""
    has_one_off: bool
    """Whether a request that is never repeated accompanies it."""


@dataclass
class Run:
    """One agent from its first turn to its last."""

    first_tokens: int
    turns: list[Turn] = field(default_factory=list)

    @property
    def contexts(self) -> list[int]:
        """The tokens of the context after each turn."""
        return list(itertools.accumulate((turn.new_tokens + OUTPUT for turn in self.turns), initial=self.first_tokens))[
            1:
        ]


def new_turn(rng: random.Random) -> Turn:
    """Draws a turn."""
    pause_s = min(LONG_PAUSE_S, PAUSE_S * math.exp(rng.gauss(0, PAUSE_SIGMA)))
    if rng.random() < LONG_PAUSES:
        pause_s = LONG_PAUSE_S + rng.expovariate(1 / (LONG_PAUSE_MEAN_S - LONG_PAUSE_S))
    length = rng.randint(1, 3) if rng.random() < BRANCHES else 0
    return Turn(new_tokens(rng), pause_s / TIME_SCALE, [new_tokens(rng) for _ in range(length)], rng.random() < 0.5)


def new_tokens(rng: random.Random) -> int:
    """Draws the number of tokens that a turn adds."""
    return max(1, min(round(4 * NEW_TOKENS), round(rng.expovariate(1 / NEW_TOKENS))))


def new_trace(seed: int, num_agents: int, num_turns: int) -> list[list[Run]]:
    """Draws the runs of each agent: one after another, until it has had this many turns. Each first run starts
    somewhere in the middle, so that the total size of all contexts stays about the same."""
    rng = random.Random(seed)
    agents = []
    for _ in range(num_agents):
        runs: list[Run] = []
        while (left := num_turns - sum(len(run.turns) for run in runs)) > 0:
            length = max(15, min(2 * MEDIAN_TURNS, round(MEDIAN_TURNS * math.exp(rng.gauss(0, 0.3)))))
            skipped = 0 if runs else rng.randrange(length)
            run = Run(FIRST_PROMPT + round(skipped * (NEW_TOKENS + OUTPUT)))
            run.turns = [new_turn(rng) for _ in range(min(left, length - skipped))]
            runs.append(run)
        agents.append(runs)
    return agents


def working_set(trace: list[list[Run]]) -> int:
    """The total tokens of the agents' contexts, averaged over time."""
    return round(sum(statistics.mean(size for run in runs for size in run.contexts) for runs in trace))


@dataclass
class Measured:
    """The cost of the agents' requests."""

    prompt_tokens: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    first_token_ms: list[float] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def percentile(self, share: float) -> float:
        """The time to the first token that this share does not exceed, in milliseconds."""
        return sorted(self.first_token_ms)[round(share * (len(self.first_token_ms) - 1))]


class Fleet:
    """All agents of a trace, on one service."""

    def __init__(self, client: AsyncClient, seed: int, options: dict[str, Any]) -> None:
        self._client = client
        self._rng = random.Random(seed)
        self._options = options
        self._releases = "retain_mode" in options
        self._shared = [number % VOCAB for number in range(SHARED)]
        self._one_offs: list[asyncio.Task[None]] = []
        self.measured = Measured()

    def _ids(self, number: int) -> list[int]:
        return [self._rng.randrange(VOCAB) for _ in range(number)]

    async def run(self, trace: list[list[Run]]) -> Measured:
        """Runs all agents to their ends."""
        begin = time.perf_counter()
        await asyncio.gather(*(self._agent(runs, number) for number, runs in enumerate(trace)))
        await asyncio.gather(*self._one_offs)
        self.measured.seconds = time.perf_counter() - begin
        return self.measured

    async def _agent(self, runs: list[Run], number: int) -> None:
        await asyncio.sleep(0.05 * number)
        for run in runs:
            last, prompt = "", self._shared + self._ids(run.first_tokens - SHARED)
            branches = []
            for turn in run.turns:
                if turn.has_one_off:
                    self._one_offs.append(asyncio.create_task(self._one_off()))
                if turn.branch and last:
                    branches.append(asyncio.create_task(self._branch(turn.branch, turn.pause_s / 3, last)))
                last = await self._turn(prompt + self._ids(turn.new_tokens), last)
                prompt = []
                self.measured.pauses_s.append(turn.pause_s)
                await asyncio.sleep(turn.pause_s)
            await asyncio.gather(*branches)
            await self._release(last)

    async def _branch(self, turns: list[int], pause_s: float, last: str) -> None:
        for number in turns:
            last = await self._turn(self._ids(number), last)
            await asyncio.sleep(pause_s)
        await self._release(last)

    async def _turn(self, prompt: list[int], last: str) -> str:
        begin, measured, is_first = time.perf_counter(), self.measured, True
        options = {**self._options, "continue_from": last or None, "max_tokens": OUTPUT, "ignore_eos": True}
        async for event in self._client.generate(prompt, **options):
            if isinstance(event, Delta) and is_first:
                is_first = False
                measured.first_token_ms.append((time.perf_counter() - begin) * 1000)
            elif isinstance(event, Finished):
                measured.prompt_tokens.append(event.usage.prompt_tokens)
                measured.computed_tokens += event.usage.prompt_tokens - event.usage.cached_tokens
                return event.request_id
        raise AssertionError("a request ends with Finished")

    async def _one_off(self) -> None:
        await self._client.complete(self._ids(ONE_OFF_TOKENS), max_tokens=1)

    async def _release(self, request_id: str) -> None:
        if self._releases:
            await self._client.release([request_id])


def cache_sizes(trace: list[list[Run]], dtype: torch.dtype) -> tuple[int, int]:
    """The bytes of a third of the working set, and the length of the longest context."""
    spec = check_checkpoint(resolve_model(DEMO)).spec
    longest = max(max(run.contexts) for runs in trace for run in runs) + 4 * round(4 * NEW_TOKENS)
    num_tokens = working_set(trace) // 3 // BLOCK * BLOCK
    return num_tokens * spec.kv_bytes_per_token(dtype.itemsize), min(longest, num_tokens)


async def measure(target: str, trace: list[list[Run]], seed: int, options: dict[str, Any]) -> tuple[Measured, int]:
    """Runs the trace; also returns the tokens that the KV cache holds."""
    async with AsyncClient(target) as client:
        limits = (await client.model()).limits
        return await Fleet(client, seed, options).run(trace), limits.num_kv_blocks * limits.kv_block_size


def numbers(measured: Measured) -> Iterator[str]:
    """The columns of the table."""
    total = sum(measured.prompt_tokens)
    yield f"{len(measured.prompt_tokens):,}"
    yield f"{total:,}"
    yield f"{measured.computed_tokens:,}"
    yield f"{measured.computed_tokens / total:.1%}"
    yield f"{measured.percentile(0.5):,.0f}"
    yield f"{measured.percentile(0.95):,.0f}"
    yield f"{measured.seconds:.0f}"


def print_heads(arguments: argparse.Namespace, trace: list[list[Run]], measured: Measured, num_tokens: int) -> None:
    """Prints a summary of the trace."""
    pauses = sorted(measured.pauses_s)
    print(
        f"{arguments.agents} agents, {arguments.turns} turns of each; median prompt "
        f"{statistics.median(measured.prompt_tokens):,.0f} tokens, {OUTPUT} out; pauses of "
        f"{statistics.median(pauses):.2f} s, 95 % up to {pauses[round(0.95 * (len(pauses) - 1))]:.2f} s"
    )
    print(f"contexts of {working_set(trace):,} tokens in a KV cache of {num_tokens:,}")
    print(f"{'':>18}" + "".join(f"{head:>{width}}" for head, width in HEADS.items()))


def main() -> None:
    """Runs the trace both ways and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=16, help="concurrent agents (default %(default)s)")
    parser.add_argument("--turns", type=int, default=43, help="per agent, without branches (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the trace (default %(default)s)")
    arguments = parser.parse_args()
    trace = new_trace(arguments.seed, arguments.agents, arguments.turns)
    num_bytes, longest = cache_sizes(trace, torch.bfloat16)
    found: dict[str, Measured] = {}
    for name, options in WAYS.items():
        with local_service("demo", kv_cache_memory_bytes=num_bytes, max_model_len=longest, dtype="bfloat16") as target:
            found[name], num_tokens = asyncio.run(measure(target, trace, arguments.seed, options))
        if len(found) == 1:
            print_heads(arguments, trace, found[name], num_tokens)
        columns = zip(numbers(found[name]), HEADS.values(), strict=True)
        print(f"{name:>18}" + "".join(f"{column:>{width}}" for column, width in columns), flush=True)
    lru, auto = found.values()
    ratio = auto.computed_tokens / lru.computed_tokens
    speedup = lru.percentile(0.5) / auto.percentile(0.5)
    met = "met" if ratio <= MAX_COMPUTED else "NOT met"
    print(
        f"{ratio:.2f} times the computed tokens of plain LRU; first token at p50 {speedup:.1f} times "
        f"sooner; target: at most {MAX_COMPUTED:g} of the computed tokens: {met}"
    )


if __name__ == "__main__":
    main()

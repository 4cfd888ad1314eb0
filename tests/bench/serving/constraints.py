"""What constraints cost: 16 requests whose outputs must match something, against 16 free ones, in tokens a second.

On the demo model, and on the same function in 1.2 GB of weights, so that a step costs what a real model's does. Each
way has a turn of 16 free requests beside it, before or after it, and the median of these pairs counts. All outputs are
of one length. Where a grammar leaves one text alone its tokens become drafts, which makes outputs faster for a reason
that has nothing to do with what masks cost: most ways are without. What the service's processes take of the CPU is told
beside the times, since others' work on the machine hardly changes it.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psutil
from spec_bench.widen import widen

from penstock.clients.bench.grpc_target import GrpcCaller
from penstock.clients.bench.runner import run
from penstock.clients.bench.target import Record
from penstock.clients.bench.trace import Trace
from penstock.clients.bench.workload import BenchRequest, ClosedLoop, random_ids
from penstock.clients.cli.options import ConnectionOptions
from penstock.models.checkpoint.checkpoint import DEMO
from penstock.service.app.embedded import local_service

VOCAB_SIZE = 4000
NUM_STREAMS = 16
PROMPT_TOKENS = 16
OUTPUT_TOKENS = {"demo": 384, "wide": 48}
"""A turn is about a second of the demo model, and some more of the wide one."""
TARGET = 0.95
TEMPERATURE = 0.7

# Outputs go on for longer than is measured.
SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 16},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "size": {"enum": ["small", "medium", "large"]},
            "scores": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
        },
        "required": ["name", "age", "size", "scores"],
        "additionalProperties": False,
    },
}
ANY_JSON = {"type": "array", "minItems": 200, "items": {"type": "object"}}
REGEX = r"([A-Z][a-z]{1,9}( [a-z]{2,9}){3,9}[.!?] ){100,200}"
LARK = """\
start: (sum "; "){100,200}
sum: product (("+" | "-") product)*
product: value (("*" | "/") value)*
value: NUMBER | NAME | "(" sum ")"
NUMBER: /[0-9]{1,4}/
NAME: /[a-z][a-z0-9_]{0,7}/
"""
KINDS: Mapping[str, Mapping[str, object]] = {
    "JSON schema": {"json_schema": SCHEMA},
    "any JSON": {"json_schema": ANY_JSON},
    "regular expression": {"regex": REGEX},
    "Lark": {"lark": LARK},
}
MIXED = tuple(KINDS.values())


@dataclass(frozen=True)
class Way:
    """How 16 requests are constrained."""

    name: str
    constraints: Sequence[Mapping[str, object]]
    """They take turns with these."""
    num_free: int = 0
    """So many of them have none."""
    is_new: bool = False
    """Whether each is told apart from all that there were."""
    has_drafts: bool = False


WAYS = (
    *(Way(name, [constraint]) for name, constraint in KINDS.items()),
    Way("all four", MIXED),
    Way("JSON schema, each a new one", [KINDS["JSON schema"]], is_new=True),
    Way("8 of all four", MIXED, num_free=NUM_STREAMS // 2),
    Way("JSON schema, with drafts", [KINDS["JSON schema"]], has_drafts=True),
    Way("all four, with drafts", MIXED, has_drafts=True),
    Way("8 of all four, with drafts", MIXED, num_free=NUM_STREAMS // 2, has_drafts=True),
)
FREE = Way("free", (), num_free=NUM_STREAMS)


@dataclass(frozen=True)
class Turn:
    """What 16 requests did."""

    free_s: float
    """From the first one's start to the last one's end, of those that are free."""
    constrained_s: float
    ttft_s: float
    """The median of the constrained ones, or else of all."""
    cpu_s: float
    """Of the service, its worker and the process that checks grammars."""
    drafted: int
    accepted: int


@dataclass
class Pairs:
    """A way's turns, each beside one of free requests."""

    way: Way
    found: list[tuple[Turn, Turn]] = field(default_factory=list)
    """The way's, and the free ones'."""

    def lines(self, output_tokens: int) -> Iterator[str]:
        """Of the table: one for the constrained requests, one for the free ones beside them."""
        num_free = self.way.num_free
        turns = [turn for turn, _ in self.found]
        num_tokens = (NUM_STREAMS - num_free) * output_tokens
        yield self._line(self.way.name, num_tokens, [turn.constrained_s for turn in turns])
        if num_free:
            yield self._line("  the free ones beside them", num_free * output_tokens, [turn.free_s for turn in turns])

    def _line(self, name: str, num_tokens: int, seconds: Sequence[float]) -> str:
        # Outputs are of one length: whoever takes as long for them as the free ones is as fast, however many they are.
        share = statistics.median(free.free_s / each for each, (_, free) in zip(seconds, self.found, strict=True))
        ttft = statistics.median(turn.ttft_s for turn, _ in self.found)
        cpu = statistics.median(turn.cpu_s / free.cpu_s for turn, free in self.found)
        drafted, accepted = (sum(getattr(turn, name) for turn, _ in self.found) for name in ("drafted", "accepted"))
        told = f"{accepted:,} of {drafted:,}" if drafted else "none"
        rate = num_tokens / statistics.median(seconds)
        return f"{name:30}{rate:10,.1f}{share:10.3f}{cpu:8.3f}{ttft * 1e3:12,.0f} ms{told:>18}"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(OUTPUT_TOKENS), default=list(OUTPUT_TOKENS))
    parser.add_argument("--rounds", type=int, default=5, help="pairs of turns of each way (default: 5)")
    parser.add_argument("--wide", type=Path, metavar="FOLDER", help="where the wide model is (default: it is made)")
    arguments = parser.parse_args(argv)
    for name in arguments.models:
        with model(name, arguments.wide) as path, local_service(path) as target:
            pairs = asyncio.run(measure(target, OUTPUT_TOKENS[name], arguments.rounds))
        report(name, pairs)


@contextmanager
def model(name: str, wide: Path | None) -> Iterator[str]:
    """What to serve."""
    if name == "demo":
        yield DEMO
    elif wide is not None:
        yield str(wide)
    else:
        with tempfile.TemporaryDirectory() as folder:
            widen(Path(folder))
            yield folder


async def measure(target: str, output_tokens: int, num_rounds: int) -> list[Pairs]:
    """All ways in each round, each after or before its free turn."""
    numbers = count()
    pairs = [Pairs(way) for way in WAYS]
    for way in (FREE, *WAYS):
        await turn(target, way, 8, numbers)  # whatever is made at the first request, grammars among it
    for number in range(num_rounds):
        for one in pairs:
            if number % 2:
                free, constrained = [await turn(target, way, output_tokens, numbers) for way in (FREE, one.way)]
            else:
                constrained, free = [await turn(target, way, output_tokens, numbers) for way in (one.way, FREE)]
            one.found.append((constrained, free))
    return pairs


async def turn(target: str, way: Way, output_tokens: int, numbers: Iterator[int]) -> Turn:
    """16 requests at once. ``numbers`` tells constraints apart."""
    requests = [request(way, at, output_tokens, next(numbers)) for at in range(NUM_STREAMS)]
    async with GrpcCaller(ConnectionOptions(target)) as caller:
        before = cpu_s()
        done = await run(Trace(requests, ClosedLoop(NUM_STREAMS)), caller)
        taken = cpu_s() - before
    assert len(done.ok) == NUM_STREAMS, done.failures
    assert {record.output_tokens for record in done.ok} == {output_tokens}, "a grammar lets outputs end too early"
    free, constrained = (
        [record for record in done.ok if ("constraint" in record.request.options) is has] for has in (False, True)
    )
    return Turn(
        _seconds(free, done.began_s),
        _seconds(constrained, done.began_s),
        statistics.median(record.ttft_s for record in constrained or free if record.ttft_s is not None),
        taken,
        sum(record.drafted_tokens for record in done.ok),
        sum(record.accepted_tokens for record in done.ok),
    )


def _seconds(records: Sequence[Record], began_s: float) -> float:
    return max((record.ended_s for record in records), default=began_s) - began_s


def cpu_s() -> float:
    """Taken so far by what this process started."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def request(way: Way, at: int, output_tokens: int, number: int) -> BenchRequest:
    """The ``at``-th of 16. Where some are free these come first."""
    options: dict[str, object] = {"temperature": TEMPERATURE, "seed": at}
    if at < way.num_free:
        options["ignore_eos"] = True
    else:
        constraint = dict(way.constraints[at % len(way.constraints)])
        if way.is_new:
            constraint = {"json_schema": {**SCHEMA, "description": f"number {number}"}}
        options |= {"constraint": constraint} if way.has_drafts else {"constraint": constraint, "max_draft_tokens": 0}
    prompt = random_ids(random.Random(at), PROMPT_TOKENS, VOCAB_SIZE)
    return BenchRequest(at, prompt, output_tokens, options={**options, "format": "token_ids"})


def report(name: str, pairs: Sequence[Pairs]) -> None:
    """The table."""
    output_tokens = OUTPUT_TOKENS[name]
    free = statistics.median(turn.free_s for one in pairs for _, turn in one.found)
    print(f"{name}: {NUM_STREAMS} requests of {output_tokens} tokens, {len(pairs[0].found)} rounds; "
          f"{NUM_STREAMS} free ones: {NUM_STREAMS * output_tokens / free:,.1f} tokens/s")  # fmt: skip
    print(f"{'':30}{'tokens/s':>10}{'of free':>10}{'CPU':>8}{'1st token':>15}{'drafts accepted':>18}")
    for one in pairs:
        print("\n".join(one.lines(output_tokens)))
    print(f"wanted without drafts: {TARGET:g} of free ones' speed\n", flush=True)


if __name__ == "__main__":
    main()

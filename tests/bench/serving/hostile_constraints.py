"""Streams that decode while constraints come, hostile ones among them: their time between tokens.

The constraints are those of tests/service/end_to_end/test_constraints.py, at random times. Three phases take turns: the
streams alone, beside the constraints, and beside free requests of the same prompts and lengths at the same times, since
requests that join a batch make its steps longer. Each round has a service of its own, which has compiled nothing yet.
"""

import argparse
import asyncio
import random
import runpy
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.clients.bench.grpc_target import GrpcCaller
from penstock.clients.bench.lengths import Uniform
from penstock.clients.bench.report import quantile
from penstock.clients.bench.runner import run
from penstock.clients.bench.target import Record
from penstock.clients.bench.trace import Trace
from penstock.clients.bench.workload import BenchRequest, ClosedLoop, OpenLoop, RandomLoad, arrival_times, random_ids
from penstock.clients.cli.options import ConnectionOptions
from penstock.service.app.embedded import local_service

VOCAB_SIZE = 4000
NUM_STREAMS = 8
WARM_S = 1.0
TAIL_S = 0.5
"""After the last arrival."""
TARGET = 1.1
REFUSED_WITHIN_S = 1.0
ALONE, BESIDE, FREE = "alone", "beside constraints", "beside free requests"


@dataclass
class Found:
    """Of all rounds. Seconds."""

    gaps: dict[str, list[float]] = field(default_factory=lambda: {ALONE: [], BESIDE: [], FREE: []})
    """Between tokens of the streams, by phase."""
    records: list[Record] = field(default_factory=list)
    """Of the constrained requests."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=10.0, help="constraints a second (default: 10)")
    parser.add_argument("--rounds", type=int, default=2, help="of all phases (default: 2)")
    parser.add_argument("--threads", type=int, default=1, help="of the worker (default: 1)")
    arguments = parser.parse_args(argv)
    found = Found()
    constrained, free = constrained_requests(arguments.rate), list[BenchRequest]()
    for number in range(arguments.rounds):
        with local_service(threads=arguments.threads) as target:
            free = asyncio.run(one_round(target, constrained, free, number, found))
    report(found, arguments)


def constrained_requests(rate: float) -> list[BenchRequest]:
    """One for each constraint, in a random order."""
    cases: list[Any] = runpy.run_path(str(Path(__file__).parents[2] / "service/end_to_end/test_constraints.py"))[
        "CASES"
    ]
    random.Random(0).shuffle(cases)
    times = arrival_times(OpenLoop(rate), seed=0)
    return [
        BenchRequest(
            at,
            random_ids(random.Random(case.name), 16, VOCAB_SIZE),
            case.max_tokens,
            arrival_s,
            options={
                "constraint": {case.kind: True if case.kind == "any_json" else case.text},
                "temperature": 0.7,
                "seed": 1,
                "format": "token_ids",
            },
        )
        for at, (case, arrival_s) in enumerate(zip(cases, times, strict=False))
    ]


def free_requests(records: Sequence[Record]) -> list[BenchRequest]:
    """Those that constrained ones would be without."""
    options = {"temperature": 0.7, "seed": 1, "ignore_eos": True, "format": "token_ids"}
    return [
        replace(record.request, max_tokens=record.output_tokens, options=options)
        for record in records
        if record.output_tokens
    ]


async def one_round(
    target: str, constrained: list[BenchRequest], free: list[BenchRequest], number: int, found: Found
) -> list[BenchRequest]:
    """All phases. How long the free requests are is learnt from the constrained ones, so the first round has these
    first; the next one has the phases the other way round. Returns the free ones."""
    seconds = (constrained[-1].arrival_s or 0.0) + TAIL_S
    phases = (ALONE, BESIDE, FREE) if number % 2 == 0 else (FREE, BESIDE, ALONE)
    for phase in phases:
        arriving = {ALONE: [], BESIDE: constrained, FREE: free}[phase]
        gaps, records = await one_phase(target, arriving, seconds)
        found.gaps[phase] += gaps
        if phase == BESIDE:
            found.records += records
            free = free_requests(records)
    return free


async def one_phase(target: str, arriving: list[BenchRequest], seconds: float) -> tuple[list[float], list[Record]]:
    """The streams' times between tokens while requests arrive, and what became of these."""
    streams = RandomLoad(
        VOCAB_SIZE,
        ClosedLoop(NUM_STREAMS),
        num_requests=None,
        prompt_tokens=Uniform(16, 16),
        output_tokens=Uniform(512, 512),
    )
    enough = asyncio.Event()
    async with GrpcCaller(ConnectionOptions(target)) as caller, GrpcCaller(ConnectionOptions(target)) as other:
        decoding = asyncio.create_task(run(streams, caller, stop=enough))
        await asyncio.sleep(WARM_S)
        begin = time.perf_counter()
        _, beside = await asyncio.gather(asyncio.sleep(seconds), run(Trace(arriving), other))
        end = time.perf_counter()
        enough.set()
        steady = await decoding
    gaps = [
        later - earlier
        for record in steady.records
        for earlier, later in pairwise(record.message_s)
        if begin <= later < end
    ]
    return gaps, beside.records


def report(found: Found, arguments: argparse.Namespace) -> None:
    """The table, and what became of the constraints."""
    print(f"{NUM_STREAMS} streams, {len(found.records)} constraints at {arguments.rate:g} a second, "
          f"{arguments.threads} threads of the worker")  # fmt: skip
    print(f"{'':26}{'between tokens, p50':>20}{'p99':>12}{'most':>12}")
    p99 = {}
    for phase, gaps in found.gaps.items():
        ordered = sorted(gaps)
        p50, p99[phase], most = (quantile(ordered, share) * 1e3 for share in (0.5, 0.99, 1.0))
        print(f"{phase:26}{p50:17.2f} ms{p99[phase]:9.2f} ms{most:9.1f} ms")
    print(
        f"p99 beside constraints: {p99[BESIDE] / p99[FREE]:.3f} times that beside free requests (wanted: at most "
        f"{TARGET:g}), {p99[BESIDE] / p99[ALONE]:.3f} times that alone"
    )
    statuses = Counter(record.failure if not record.is_ok else record.status for record in found.records)
    print("became: " + ", ".join(f"{number} {status}" for status, number in statuses.most_common()))
    refused = sorted(record.e2e_s for record in found.records if record.status == "INVALID_ARGUMENT")
    print(f"refused after {quantile(refused, 0.5) * 1e3:.0f} ms p50, {refused[-1] * 1e3:.0f} ms at most "
          f"(wanted: {REFUSED_WITHIN_S:g} s)")  # fmt: skip


if __name__ == "__main__":
    main()

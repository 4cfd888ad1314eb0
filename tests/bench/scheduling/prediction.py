"""How well the time to first token is predicted: what ``accepted`` says against what the client sees.

First random prompts and outputs, at shares of the capacity that a closed loop finds. Then bursts of prompts that are
new, cached, shared within the burst, or continued. Each is sent twice; the second time its deadline is twice the time
that the first took, by which no request should be refused. The service and the client share two cores.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence

from penstock.clients.bench.grpc_target import GrpcCaller
from penstock.clients.bench.lengths import Uniform
from penstock.clients.bench.report import Report
from penstock.clients.bench.runner import run
from penstock.clients.bench.target import Record
from penstock.clients.bench.workload import (
    DEFAULT_OPTIONS,
    Arrivals,
    BenchRequest,
    ClosedLoop,
    OpenLoop,
    RandomLoad,
    random_ids,
)
from penstock.clients.cli.options import ConnectionOptions
from penstock.service.app.embedded import local_service

VOCAB_SIZE = 4000
MAX_ROWS = 32
TARGET, BURST_TARGET = 0.25, 0.5
LOADS = (0.3, 0.7, 1.0)
BURSTS = (16, 64, 256, 1024)
KINDS = ("new", "cached", "shared", "continued")
PROMPT_TOKENS, OUTPUT_TOKENS = Uniform(200, 300), 8
PREFIX_TOKENS, OWN_TOKENS, NEW_TOKENS = Uniform(200, 200), Uniform(5, 100), Uniform(20, 20)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals at each load; 0: none (default: 10)")
    parser.add_argument("--model", default="demo", help="a model's directory (default: the demo model)")
    parser.add_argument(
        "--bursts", type=int, nargs="*", default=BURSTS, help="requests in a burst (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    if arguments.seconds:
        with local_service(arguments.model, threads=1, max_num_seqs=MAX_ROWS, enable_prefix_caching=False) as target:
            asyncio.run(benchmark(target, arguments.seconds))
    if arguments.bursts:
        with local_service(arguments.model) as target:
            asyncio.run(Bursts(target).run(arguments.bursts))


async def benchmark(target: str, seconds: float) -> None:
    """Finds the capacity, then offers shares of it."""
    async with GrpcCaller(ConnectionOptions(target)) as caller:
        await offer(caller, ClosedLoop(MAX_ROWS), 2.0)  # the service learns how long steps take
        report = await offer(caller, ClosedLoop(2 * MAX_ROWS), seconds / 2)
        capacity = len(report.ok) / report.seconds
        print(f"capacity: {capacity:.1f} requests/s, prompts of 32 to 512 tokens, outputs of 16 to 128")
        print(f"{'load':>6}{'requests':>10}{'median TTFT':>14}{'p90':>10}{'error: median':>16}{'p90':>8}{'bias':>8}")
        for load in LOADS:
            print(line(load, await offer(caller, OpenLoop(load * capacity), seconds)))
    print(f"error: |predicted / measured - 1|; wanted: a median of at most {TARGET:.0%}")


async def offer(caller: GrpcCaller, arrivals: Arrivals, seconds: float) -> Report:
    """Sends so long, and waits for the ends."""
    load = RandomLoad(
        VOCAB_SIZE, arrivals, num_requests=None, prompt_tokens=Uniform(32, 512), output_tokens=Uniform(16, 128)
    )
    return await run(load, caller, duration_s=seconds)


def line(load: float, report: Report) -> str:
    """A line of the table."""
    ratios = predicted_ratios(report.records)
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    times = sorted(record.ttft_s for record in report.records if record.ttft_s is not None)
    return (
        f"{load:6.0%}{len(ratios):10}{statistics.median(times) * 1e3:11.1f} ms"
        f"{times[len(times) * 9 // 10] * 1e3:7.0f} ms"
        f"{statistics.median(errors):16.1%}{errors[len(errors) * 9 // 10]:8.0%}{statistics.median(ratios) - 1:+8.0%}"
    )


def predicted_ratios(records: Sequence[Record]) -> list[float]:
    """Predicted times to first token over measured ones."""
    return [
        record.predicted_ttft_s / record.ttft_s
        for record in records
        if record.predicted_ttft_s is not None and record.ttft_s is not None
    ]


class Bursts:
    """Bursts against one service."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._rng = random.Random(1)

    async def run(self, sizes: Sequence[int]) -> None:
        """Prints the table."""
        print(f"bursts of prompts of {PROMPT_TOKENS} tokens, outputs of {OUTPUT_TOKENS}")
        print(
            f"{'requests':>8}{'prompts':>11}{'done after':>12}{'error: median':>16}{'bias':>8}{'refused':>9}{'late':>6}"
        )
        await self._burst("new", 16)  # the service learns how long steps take
        for size in sizes:
            for kind in KINDS:
                records = await self._burst(kind, size)
                longest_s = max(record.ended_s - record.sent_s for record in records)
                limited = await self._burst(kind, size, 2 * longest_s)
                refused = sum(record.status == "RESOURCE_EXHAUSTED" for record in limited)
                late = sum(not record.is_ok for record in limited) - refused
                ratios = predicted_ratios(records)
                error, bias = statistics.median(abs(ratio - 1) for ratio in ratios), statistics.median(ratios) - 1
                print(f"{size:8}{kind:>11}{longest_s:10.2f} s{error:16.0%}{bias:+8.0%}{refused:9}{late:6}", flush=True)
        print(
            f"wanted: a median error of at most {BURST_TARGET:.0%}, and none refused with a deadline of twice the time"
        )

    async def _burst(self, kind: str, size: int, timeout_s: float | None = None) -> list[Record]:
        """One burst, sent once all that it may find in the cache is there."""
        prompts = [self._ids(PROMPT_TOKENS) for _ in range(size)]
        before: list[Record] = []
        if kind == "shared":
            prefix = self._ids(PREFIX_TOKENS)
            prompts = [prefix + self._ids(OWN_TOKENS) for _ in range(size)]
        elif kind in ("cached", "continued"):
            before = await self._send(prompts)
        if kind == "continued":
            return await self._send([self._ids(NEW_TOKENS) for _ in range(size)], timeout_s, before)
        return await self._send(prompts, timeout_s)

    async def _send(
        self, prompts: Sequence[list[int]], timeout_s: float | None = None, before: Sequence[Record] = ()
    ) -> list[Record]:
        """Sends all at once, each to go on from one ``before``, and waits for the ends."""
        async with GrpcCaller(ConnectionOptions(self._target), timeout_s=timeout_s) as caller:
            now = time.perf_counter()
            records = [
                Record(BenchRequest(number, prompt, OUTPUT_TOKENS, options=DEFAULT_OPTIONS), now)
                for number, prompt in enumerate(prompts)
            ]
            pasts = [[record] for record in before] or [[] for _ in records]
            calls = zip(records, pasts, strict=True)
            await asyncio.gather(*(caller.call(record.request, past, record) for record, past in calls))
        return records

    def _ids(self, lengths: Uniform) -> list[int]:
        return random_ids(self._rng, lengths.draw(self._rng), VOCAB_SIZE)


if __name__ == "__main__":
    main()

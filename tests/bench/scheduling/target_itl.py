"""A long prompt beside 16 decoding streams: their time between tokens, and the prompt's own speed, with --target-itl.

First without a target, where a step takes as many tokens of the prompt as the budget allows; then with twice the median
step that the streams had while nothing disturbed them. Times are the client's; it shares two cores with the service.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.clients.bench.grpc_target import GrpcCaller
from penstock.clients.bench.lengths import Uniform
from penstock.clients.bench.report import quantile
from penstock.clients.bench.runner import BenchProgress, run
from penstock.clients.bench.target import Record
from penstock.clients.bench.workload import ClosedLoop, RandomLoad
from penstock.clients.cli.options import ConnectionOptions
from penstock.service.app.embedded import local_service

VOCAB_SIZE = 4000
NUM_STREAMS = 16
PROMPT_TOKENS = 8000
QUIET_S = 2.0
WARM_S = 0.5
"""In which the streams have their first tokens."""
FACTOR = 2.0
"""The target, in median steps."""
TOLERANCE = 1.5
"""Of the target, for the 99th percentile."""
NO_TARGET_MS = 60_000.0
"""No step takes so long, so the budget alone bounds a chunk."""


@dataclass(frozen=True)
class Measured:
    """What one service did. Seconds."""

    quiet: list[float]
    """Times between tokens, in order of length, with nothing beside the streams."""
    beside: list[float]
    """The same, from the prompt's arrival to its first token."""
    ttft: float

    @property
    def throughput(self) -> float:
        """Of the prompt: tokens a second."""
        return PROMPT_TOKENS / self.ttft


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="prompts, one after another (default: 1)")
    arguments = parser.parse_args(argv)
    plain = measure(NO_TARGET_MS, arguments.rounds)
    median = quantile(plain.quiet, 0.5)
    target_ms = FACTOR * median * 1e3
    aimed = measure(target_ms, arguments.rounds)
    print(
        f"{NUM_STREAMS} streams, a prompt of {PROMPT_TOKENS:,} tokens; undisturbed median step: {median * 1e3:.2f} ms"
    )
    print(f"{'':26}{'between tokens, p50':>20}{'p99':>11}{'of target':>11}{'prompt, tokens/s':>18}")
    for label, measured in (("plain budget", plain), (f"--target-itl {target_ms:.1f}", aimed)):
        p99 = quantile(measured.beside, 0.99) * 1e3
        print(
            f"{label:26}{quantile(measured.beside, 0.5) * 1e3:17.1f} ms{p99:8.1f} ms{p99 / target_ms:11.2f}"
            f"{measured.throughput:18,.0f}"
        )
    print(
        f"wanted: p99 within {TOLERANCE:g} of the target, and 80 % of the throughput; "
        f"it is {aimed.throughput / plain.throughput:.0%}"
    )


def measure(target_ms: float, rounds: int) -> Measured:
    """Starts a service and measures it."""
    with local_service(threads=1, max_num_seqs=32, enable_prefix_caching=False, target_itl=target_ms) as target:
        results = [asyncio.run(one_round(target, number)) for number in range(rounds + 1)]
    results = results[1:]  # the first one taught the service how long steps take
    return Measured(
        sorted(gap for result in results for gap in result.quiet),
        sorted(gap for result in results for gap in result.beside),
        sum(result.ttft for result in results) / len(results),
    )


async def one_round(target: str, number: int) -> Measured:
    """One prompt."""
    streams = RandomLoad(
        VOCAB_SIZE,
        ClosedLoop(NUM_STREAMS),
        num_requests=NUM_STREAMS,
        prompt_tokens=Uniform(16, 16),
        output_tokens=Uniform(8000, 8000),
        seed=f"streams {number}",
    )
    prompt = RandomLoad(
        VOCAB_SIZE,
        num_requests=1,
        prompt_tokens=Uniform(PROMPT_TOKENS, PROMPT_TOKENS),
        output_tokens=Uniform(1, 1),
        seed=f"prompt {number}",
    )
    all_run, enough = asyncio.Event(), asyncio.Event()

    def watch(progress: BenchProgress) -> None:
        if progress.running == NUM_STREAMS:
            all_run.set()

    async with GrpcCaller(ConnectionOptions(target)) as caller:
        decoding = asyncio.create_task(run(streams, caller, stop=enough, on_progress=watch))
        await all_run.wait()
        await asyncio.sleep(WARM_S)
        quiet_from = time.perf_counter()
        await asyncio.sleep(QUIET_S)
        quiet_to = time.perf_counter()
        long = (await run(prompt, caller)).records[0]
        enough.set()
        report = await decoding
    assert long.ttft_s is not None, f"the long prompt failed: {long.error}"
    return Measured(
        gaps(report.records, quiet_from, quiet_to), gaps(report.records, long.sent_s, long.ended_s), long.ttft_s
    )


def gaps(records: Sequence[Record], begin: float, end: float) -> list[float]:
    """Times between tokens of all streams, where the later one came within these times."""
    return sorted(
        later - earlier for record in records for earlier, later in pairwise(record.message_s) if begin <= later < end
    )


if __name__ == "__main__":
    main()

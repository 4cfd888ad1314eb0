"""How well the time to first token is predicted: what ``accepted`` says against what the client sees.

The demo model with random prompts and outputs, at shares of the capacity that a closed loop finds first. The service
and the client share two cores.
"""

import argparse
import asyncio
import statistics
from collections.abc import Sequence

from penstock.clients.bench_grpc import GrpcCaller
from penstock.clients.bench_lengths import Uniform
from penstock.clients.bench_load import Arrivals, ClosedLoop, OpenLoop, RandomLoad
from penstock.clients.bench_report import Report
from penstock.clients.bench_run import run
from penstock.clients.connection import Connection
from penstock.service.local import local_service

VOCAB_SIZE = 4000
MAX_ROWS = 32
TARGET = 0.25
LOADS = (0.3, 0.7, 1.0)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals at each load (default: 10)")
    parser.add_argument("--model", default="demo", help="a model's directory (default: the demo model)")
    arguments = parser.parse_args(argv)
    with local_service(arguments.model, threads=1, max_num_seqs=MAX_ROWS, enable_prefix_caching=False) as target:
        asyncio.run(benchmark(target, arguments.seconds))


async def benchmark(target: str, seconds: float) -> None:
    """Finds the capacity, then offers shares of it."""
    async with GrpcCaller(Connection(target)) as caller:
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
    pairs = [
        (record.predicted_ttft_s, record.ttft_s)
        for record in report.records
        if record.predicted_ttft_s is not None and record.ttft_s is not None
    ]
    ratios = [predicted / measured for predicted, measured in pairs]
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    times = sorted(measured for _, measured in pairs)
    return (
        f"{load:6.0%}{len(pairs):10}{statistics.median(times) * 1e3:11.1f} ms"
        f"{times[len(times) * 9 // 10] * 1e3:7.0f} ms"
        f"{statistics.median(errors):16.1%}{errors[len(errors) * 9 // 10]:8.0%}{statistics.median(ratios) - 1:+8.0%}"
    )


if __name__ == "__main__":
    main()

"""Five times as much as the service can do: goodput, refusals, deadlines, and how soon all is normal again.

First a closed loop finds the capacity: requests a second that are done within the SLO, which each also carries as its
deadline. Then five times as many arrive at random times, on the same client and the same cores; then little.
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence

from penstock.clients.bench.grpc_target import GrpcCaller
from penstock.clients.bench.lengths import Uniform
from penstock.clients.bench.report import Report, Slo, quantile
from penstock.clients.bench.runner import run
from penstock.clients.bench.target import Record
from penstock.clients.bench.workload import Arrivals, ClosedLoop, OpenLoop, RandomLoad
from penstock.clients.cli.options import ConnectionOptions
from penstock.service.app.embedded import local_service

VOCAB_SIZE = 4000
MAX_ROWS = 32
FACTOR = 5.0
NORMAL_S = 5.0
"""So soon after the load has passed everything is wanted to be as before it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="of overload (default: 15; the target's are 60)")
    parser.add_argument("--slo", type=float, default=3.0, help="seconds from sending to the end (default: 3)")
    parser.add_argument("--policy", default="deadline", help="the service's --scheduling-policy (default: deadline)")
    arguments = parser.parse_args(argv)
    with local_service(
        threads=1, max_num_seqs=MAX_ROWS, enable_prefix_caching=False, scheduling_policy=arguments.policy
    ) as target:
        asyncio.run(Benchmark(target, arguments.slo).run(arguments.seconds))


class Benchmark:
    """One service under one SLO."""

    def __init__(self, target: str, slo_s: float) -> None:
        self._target = target
        self._slo_s = slo_s
        self._num_loads = 0

    async def run(self, seconds: float) -> None:
        """Prints the table."""
        async with GrpcCaller(ConnectionOptions(self._target), timeout_s=self._slo_s) as caller:
            await self._offer(caller, ClosedLoop(MAX_ROWS), 3.0)
            before = await self._offer(caller, ClosedLoop(MAX_ROWS + MAX_ROWS // 4), max(5.0, seconds / 2))
            capacity = self._goodput(before, before.began_s, before.began_s + max(5.0, seconds / 2))
            few = 0.3 * capacity
            quiet = await self._offer(caller, OpenLoop(few), 5.0)
            over = asyncio.create_task(self._offer(caller, OpenLoop(FACTOR * capacity), seconds))
            await asyncio.sleep(seconds)
            after = await self._offer(caller, OpenLoop(few), 2 * NORMAL_S)
            overload = await over
        print(f"SLO: done within {self._slo_s:g} s. {MAX_ROWS} rows, prompts of 32 to 512 tokens, outputs of 16 to 128")
        print(f"{'capacity, closed loop':34}{capacity:8.1f} good requests/s")
        self._print_overload(overload, seconds, capacity)
        self._print_recovery(quiet, after)
        print(f"{'client, busiest second':34}{overload.client.busiest_second_share:8.0%} of a core")

    async def _offer(self, caller: GrpcCaller, arrivals: Arrivals, seconds: float) -> Report:
        self._num_loads += 1
        load = RandomLoad(
            VOCAB_SIZE,
            arrivals,
            num_requests=None,
            prompt_tokens=Uniform(32, 512),
            output_tokens=Uniform(16, 128),
            seed=self._num_loads,
        )
        return await run(load, caller, duration_s=seconds)

    def _goodput(self, report: Report, begin: float, end: float) -> float:
        slo = Slo(e2e=self._slo_s)
        return sum(slo.is_kept(record) and begin <= record.ended_s < end for record in report.records) / (end - begin)

    def _print_overload(self, report: Report, seconds: float, capacity: float) -> None:
        goodput = self._goodput(report, report.began_s, report.began_s + seconds)
        sent = len(report.records)
        refused = sorted(record.e2e_s for record in report.records if record.status == "RESOURCE_EXHAUSTED")
        admitted = [record for record in report.records if record.status != "RESOURCE_EXHAUSTED"]
        in_time = sum(Slo(e2e=self._slo_s).is_kept(record) for record in admitted)
        cut = [record for record in admitted if not record.is_ok]
        print(f"{'offered for ' + format(seconds, 'g') + ' s':34}{sent / seconds:8.1f} requests/s")
        print(f"{'goodput':34}{goodput:8.1f} good requests/s, {goodput / capacity:.0%} of capacity (wanted: 90 %)")
        if refused:
            print(
                f"{'refused':34}{len(refused) / sent:8.0%}, after {quantile(refused, 0.5) * 1e3:.1f} ms p50, "
                f"{quantile(refused, 0.99) * 1e3:.1f} ms p99 (wanted: 50 ms)"
            )
        print(f"{'admitted':34}{len(admitted):8}, {in_time / max(1, len(admitted)):.1%} done in time (wanted: 95 %)")
        print(f"{'ended by their deadline':34}{len(cut):8}, {sum(not record.output_tokens for record in cut)} unbegun")

    def _print_recovery(self, quiet: Report, after: Report) -> None:
        """When times to the first token were as before the overload, for good: in each second since, the median of the
        requests sent in it was below what nine in ten had before."""
        usual = quantile(sorted(map(ttft, quiet.records)), 0.9)
        seconds: dict[int, list[float]] = {}
        for record in after.records:
            seconds.setdefault(int(record.sent_s - after.began_s), []).append(ttft(record))
        slow = [second + 1 for second, times in seconds.items() if quantile(sorted(times), 0.5) > usual]
        print(
            f"{'normal again':34}{max(slow, default=0):8} s after it (wanted: {NORMAL_S:g} s); time to first token "
            f"at 30 % load: {p50(quiet, ttft) * 1e3:.0f} ms p50 before, {p50(after, ttft) * 1e3:.0f} ms after"
        )


def ttft(record: Record) -> float:
    """A request that got no token never had one."""
    return float("inf") if record.ttft_s is None else record.ttft_s


def p50(report: Report, value: Callable[[Record], float]) -> float:
    """Of all requests."""
    return quantile(sorted(map(value, report.records)), 0.5)


if __name__ == "__main__":
    main()

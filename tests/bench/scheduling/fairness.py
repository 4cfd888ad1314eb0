"""A tenant at 50 times another's rate, under ``fair``: what that does to the other's time to first token.

Both come through one gateway's Generate stream, whose key may act for others. Each tenant may have some live requests,
as an operator would have it; what is beyond that is refused.
"""

import argparse
import asyncio
import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock.clients.bench.grpc_target import GrpcCaller
from penstock.clients.bench.lengths import Uniform
from penstock.clients.bench.report import Report, quantile
from penstock.clients.bench.runner import run
from penstock.clients.bench.workload import OpenLoop, RandomLoad
from penstock.clients.cli.options import ConnectionOptions
from penstock.service.app.embedded import local_service

VOCAB_SIZE = 4000
KEY = "the gateway's key"
RATE = 6.0
"""Requests a second of the quiet tenant."""
FACTOR = 50.0
MAX_LIVE = 16
TARGET = 1.5


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0, help="measured for so long, each time (default: 12)")
    parser.add_argument("--policy", default="fair", help="the service's --scheduling-policy (default: fair)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        keys, tenants = Path(directory, "keys"), Path(directory, "tenants.yaml")
        keys.write_text(f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()} gateway act-for-others\n")
        keys.chmod(0o600)
        tenants.write_text(f"default: {{max-live-requests: {MAX_LIVE}}}\n")
        with local_service(
            threads=1,
            max_num_seqs=32,
            enable_prefix_caching=False,
            scheduling_policy=arguments.policy,
            api_keys_file=keys,
            tenants_file=tenants,
        ) as target:
            asyncio.run(benchmark(ConnectionOptions(target, api_key=KEY), arguments.seconds))


async def benchmark(service: ConnectionOptions, seconds: float) -> None:
    """The quiet tenant alone, then beside the loud one."""
    async with GrpcCaller(service) as caller:
        await offer(caller, "quiet", RATE, 3.0)  # the service learns how long steps take
        alone = await offer(caller, "quiet", RATE, seconds)
        loud = asyncio.create_task(offer(caller, "loud", FACTOR * RATE, seconds + 4.0))
        await asyncio.sleep(2.0)
        beside = await offer(caller, "quiet", RATE, seconds)
        flood = await loud
    print(f"{'':26}{'requests':>10}{'answered':>10}{'TTFT, p50':>14}{'p99':>12}")
    for label, report in (("quiet, alone", alone), ("quiet, beside loud", beside), ("loud", flood)):
        print(
            f"{label:26}{len(report.records):10}{len(report.ok):10}{ttft(report, 0.5) * 1e3:11.1f} ms"
            f"{ttft(report, 0.99) * 1e3:9.1f} ms"
        )
    print(f"p99 beside / alone: {ttft(beside, 0.99) / ttft(alone, 0.99):.2f} (wanted: at most {TARGET:g})")


async def offer(caller: GrpcCaller, tenant: str, rate: float, seconds: float) -> Report:
    """Sends so long, and waits for the ends."""
    load = RandomLoad(
        VOCAB_SIZE,
        OpenLoop(rate),
        num_requests=None,
        prompt_tokens=Uniform(32, 512),
        output_tokens=Uniform(16, 128),
        seed=tenant,
        options={"temperature": 0, "ignore_eos": True, "tenant": tenant},
    )
    return await run(load, caller, duration_s=seconds)


def ttft(report: Report, share: float) -> float:
    """A quantile of those that were answered."""
    return quantile(sorted(record.ttft_s for record in report.ok if record.ttft_s is not None), share)


if __name__ == "__main__":
    main()

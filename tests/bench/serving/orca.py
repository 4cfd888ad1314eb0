"""Envoy in front of two services with unequal load: the share of new requests that the less loaded one gets.

There is a line for each policy. The less loaded one has a quarter of the other's load, which comes from requests that
do not pass through Envoy, such as those of another proxy or of long streams.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from proxies.envoy import ENVOY_IS_MISSING, Config, Envoy, cluster_of, find_envoy, policy_of, running_envoy
from proxies.replicas import LOADS, NUM_ROWS, Replica, replicas, share_of_second

from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.service.text.tokenizer import Tokenizer


def _shipped(config: Config) -> None:
    pass


def _trailers(config: Config) -> None:
    policy_of(config)["enable_oob_load_report"] = False


def _without_reports(policy: str) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        del cluster_of(config)["load_balancing_policy"]
        cluster_of(config)["lb_policy"] = policy

    return change


POLICIES: dict[str, Callable[[Config], None]] = {
    "round robin": _without_reports("ROUND_ROBIN"),
    "least requests": _without_reports("LEAST_REQUEST"),
    "load reports in trailers": _trailers,
    "a stream of load reports, as shipped": _shipped,
}


async def _share(program: str, tokenizer: Tokenizer, change: Callable[[Config], None], num_requests: int) -> float:
    async with replicas(tokenizer, *LOADS) as running:
        targets = [replica.target for replica in running]
        with tempfile.TemporaryDirectory() as folder:
            async with running_envoy(program, Path(folder), *targets, change=change) as proxy:
                reports = change in (_shipped, _trailers)
                return await share_of_second(
                    proxy.target, running, num_requests, (lambda: _has_weights(proxy, running)) if reports else None
                )


async def _has_weights(proxy: Envoy, running: list[Replica]) -> bool:
    weights = await asyncio.to_thread(proxy.weights)
    busy, other = (weights[replica.target] for replica in running)
    return other > busy


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400, help="new requests for each policy")
    arguments = parser.parse_args()
    program = find_envoy()
    if program is None:
        print(ENVOY_IS_MISSING, file=sys.stderr)
        return 1
    tokenizer = Tokenizer(resolve_model(DEMO))
    print(f"rows in use before: {LOADS[0]} and {LOADS[1]} of {NUM_ROWS}; {arguments.requests} new requests")
    print(f"{'policy':40} share of the less loaded replica")
    for name, change in POLICIES.items():
        share = asyncio.run(_share(program, tokenizer, change, arguments.requests))
        print(f"{name:40} {share:.0%}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The time to the first text of a chat: over gRPC, over HTTP, and through Envoy and smg in front of either.

One `penstock serve` with the demo model, its HTTP gateway, two Envoys and two smgs run all the time, on the same cores
as the client. The ways take turns, and no prompt is sent twice. The shared prefixes are in the cache before the first
measured turn. Each request is a chat with the same options, and over gRPC a call of its own (`GenerateOne`).
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from proxies.envoy import ENVOY_IS_MISSING, find_envoy, for_http, running_envoy
from serve_process import http_target_of, serving, target_of
from smg_process import SMG_IS_MISSING, has_smg, running_smg

import penstock.v1 as pb
from penstock.clients.bench.lengths import Uniform
from penstock.clients.bench.openai_target import OpenAiCaller, chat_messages
from penstock.clients.bench.report import quantile
from penstock.clients.bench.runner import run
from penstock.clients.bench.target import OK, BenchTarget, Record
from penstock.clients.bench.workload import DEFAULT_OPTIONS, BenchRequest, ClosedLoop, RandomLoad
from penstock.clients.channel import open_channel
from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.requests import build_start
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

GRPC, HTTP = "gRPC", "HTTP"
GRPC_ENVOY, HTTP_ENVOY = "gRPC through Envoy", "HTTP through Envoy"
SMG_GRPC, SMG_HTTP = "smg with grpc://", "smg with http://"
BASES = {GRPC: (GRPC_ENVOY, HTTP, HTTP_ENVOY, SMG_GRPC, SMG_HTTP), HTTP: (HTTP_ENVOY, SMG_GRPC, SMG_HTTP)}
"""The direct ways, each with the ways that are compared with it. smg's clients use HTTP, whatever its workers use."""
FLAGS = ("--contracts=vllm", "--port=0", "--http-port=0", "--metrics-listen=off", "--admin-listen=off")
VOCAB_SIZE = 4000
"""Each id becomes one of 90 words."""
NUM_PREFIXES = 8
OPTIONS = {**DEFAULT_OPTIONS, "return_token_ids": None}
"""Without ids: smg sends none over grpc://, so the first text counts for every way."""


class GrpcChat:
    """Chats over gRPC."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = GenerationServiceStub(channel)

    async def call(self, request: BenchRequest, past: Sequence[Record], record: Record) -> None:
        """Sends a request and notes when its text arrives. Raises grpc.aio.AioRpcError."""
        options = {**DEFAULT_OPTIONS, "max_tokens": request.max_tokens, "format": "text"}
        start = build_start(chat_messages(request, past), options, None)
        async for response in self._stub.GenerateOne(pb.GenerateOneRequest(start=start)):
            if any(delta.text for delta in response.deltas):
                record.tokens(time.perf_counter(), (), 1)
        record.ended_s, record.status = time.perf_counter(), OK


@dataclass
class Turn:
    """The next requests of a load that all ways share."""

    rest: Iterator[Sequence[BenchRequest]]
    arrivals: ClosedLoop
    num_requests: int

    def conversations(self) -> Iterator[Sequence[BenchRequest]]:
        """Takes them from the load."""
        return itertools.islice(self.rest, self.num_requests)


@dataclass
class Times:
    """What was measured of one way, in ms."""

    rounds: list[list[float]] = field(default_factory=list)

    def at(self, share: float) -> float:
        """Returns a quantile over all rounds."""
        return quantile(sorted(itertools.chain(*self.rounds)), share)


def main() -> int:
    """Prints a table for each load; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--through", nargs="*", choices=["envoy", "smg"], default=["envoy", "smg"],
                        help="the gateways to measure besides the direct ways (default: both)")  # fmt: skip
    parser.add_argument("--requests", type=int, default=1000, help="for each way and load (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each way (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at a time (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=32, help="words of a prompt (default: %(default)s)")
    parser.add_argument("--prefix", type=int, nargs="+", default=[0, 2000],
                        help=f"a load for each: words before the prompt, one of {NUM_PREFIXES} texts that requests "
                             "share (default: 0 2000)")  # fmt: skip
    parser.add_argument("--output", type=int, default=4, help="tokens of an output (default: %(default)s)")
    arguments = parser.parse_args()
    missing = []
    if "envoy" in arguments.through and find_envoy() is None:
        missing.append(ENVOY_IS_MISSING)
    if "smg" in arguments.through and not has_smg():
        missing.append(SMG_IS_MISSING)
    if missing:
        print(*missing, "--through names the gateways to measure", sep="\n", file=sys.stderr)
        return 1
    asyncio.run(_benchmark(arguments))
    return 0


async def _benchmark(arguments: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        ways = await _open_ways(stack, arguments.through)
        for prefix in arguments.prefix:
            load = RandomLoad(
                VOCAB_SIZE,
                num_requests=None,
                prompt_tokens=Uniform(arguments.prompt, arguments.prompt),
                output_tokens=Uniform(arguments.output, arguments.output),
                prefix_tokens=prefix,
                num_prefixes=NUM_PREFIXES,
                options=OPTIONS,
            )
            shared = f" after one of {NUM_PREFIXES} shared prefixes of {prefix:,} words" if prefix else ""
            print(f"prompts of {arguments.prompt} words{shared}, outputs of {arguments.output} tokens, "
                  f"{arguments.concurrency} requests at a time; ms to the first text, p50 of each round:")  # fmt: skip
            print(f"{'':8}" + "".join(f"{name:>20}" for name in ways), flush=True)
            _report(await _measure(ways, load, arguments))


async def _open_ways(stack: AsyncExitStack, through: Sequence[str]) -> dict[str, BenchTarget]:
    """Starts the service and the gateways; returns a caller for each way."""
    _, greeting = stack.enter_context(serving("demo", *FLAGS, "--log-level=warning"))
    service, gateway = target_of(greeting), http_target_of(greeting)
    addresses = {GRPC: service, HTTP: gateway}
    if "envoy" in through:
        program = str(find_envoy())
        addresses[GRPC_ENVOY] = (
            await stack.enter_async_context(running_envoy(program, _folder(stack), service))
        ).target
        http_envoy = running_envoy(program, _folder(stack), gateway, change=for_http)
        addresses[HTTP_ENVOY] = (await stack.enter_async_context(http_envoy)).target
    if "smg" in through:
        for name, url in ((SMG_GRPC, f"grpc://{service}"), (SMG_HTTP, f"http://{gateway}")):
            addresses[name] = str((await stack.enter_async_context(running_smg(_folder(stack), url))).base_url)
    ways: dict[str, BenchTarget] = {}
    for name in (GRPC, GRPC_ENVOY):
        if name in addresses:
            channel = await stack.enter_async_context(open_channel(addresses[name], None))
            ways[name] = GrpcChat(channel)
    for name in (HTTP, HTTP_ENVOY, SMG_GRPC, SMG_HTTP):
        if name in addresses:
            caller = OpenAiCaller(ConnectionOptions(addresses[name]), model="demo", endpoint="/v1/chat/completions")
            ways[name] = await stack.enter_async_context(caller)
    return ways


def _folder(stack: AsyncExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory()))


async def _measure(ways: dict[str, BenchTarget], load: RandomLoad, arguments: argparse.Namespace) -> dict[str, Times]:
    """The ways take turns, each time with another one first. Round 0 is not measured."""
    arrivals = ClosedLoop(arguments.concurrency)
    rest = load.conversations()
    measured = {name: Times() for name in ways}
    for number in range(1 + arguments.rounds):
        first = number % len(ways)
        p50s = {}
        for name in [*ways][first:] + [*ways][:first]:
            report = await run(Turn(rest, arrivals, -(-arguments.requests // arguments.rounds)), ways[name])
            times = [1e3 * record.ttft_s for record in report.ok if record.ttft_s is not None]
            assert len(times) == len(report.records), (name, report.failures, report.records[0].error)
            p50s[name] = quantile(sorted(times), 0.5)
            if number:
                measured[name].rounds.append(times)
        label = f"{number:>2} of {arguments.rounds}" if number else "warm-up"
        print(f"{label:8}" + "".join(f"{p50s[name]:20.2f}" for name in ways), flush=True)
    return measured


def _report(measured: dict[str, Times]) -> None:
    """Prints each way's times and what they are above those of the direct ways."""
    print(f"\n{'all rounds, ms':20}{'requests':>10}{'p50':>10}{'p99':>10}"
          + "".join(f"{f'over {base}: p50':>20}{'p99':>10}" for base in BASES))  # fmt: skip
    for name, times in measured.items():
        line = f"{name:20}{sum(map(len, times.rounds)):10,}{times.at(0.5):10.2f}{times.at(0.99):10.2f}"
        for base, compared in BASES.items():
            above = [times.at(share) - measured[base].at(share) for share in (0.5, 0.99)]
            line += f"{above[0]:+20.2f}{above[1]:+10.2f}" if name in compared else " " * 30
        print(line.rstrip())
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())

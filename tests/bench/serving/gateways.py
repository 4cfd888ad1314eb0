"""The time to the first text of a chat: over gRPC, over HTTP, and through Envoy and smg in front of either.

One `penstock serve` with the demo model, its HTTP gateway, two Envoys and two smgs run all the time, on the same cores
as the client; the worker has one thread. In each round every way has a short turn, in random order, and no prompt is
sent twice. Shared prefixes are in the cache before the first measured turn. Each request is a chat with the same
options, and over gRPC a call of its own (`GenerateOne`).
"""

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
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
FLAGS = (
    "--contracts=vllm", "--port=0", "--http-port=0", "--metrics-listen=off", "--admin-listen=off", "--threads=1",
    "--log-level=warning",
)  # fmt: skip
VOCAB_SIZE = 4000
"""Each id becomes one of a few words."""
NUM_PREFIXES = 8
NUM_RESAMPLES = 200
NUM_LINES = 10
"""Lines of progress for each load."""
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


Rounds = Sequence[list[float]]
"""The times of one way, in ms."""


def main() -> int:
    """Prints a table for each load; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--through", nargs="*", choices=["envoy", "smg"], default=["envoy", "smg"],
                        help="the gateways to measure besides the direct ways (default: both)")  # fmt: skip
    parser.add_argument("--requests", type=int, default=1200, help="for each way and load (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=100, help="turns of each way (default: %(default)s)")
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
                  f"{arguments.concurrency} requests at a time; p50 so far:")  # fmt: skip
            print(f"{'rounds':8}" + "".join(f"{name:>20}" for name in ways), flush=True)
            _report(await _measure(ways, load, arguments))


async def _open_ways(stack: AsyncExitStack, through: Sequence[str]) -> dict[str, BenchTarget]:
    """Starts the service and the gateways; returns a caller for each way."""
    _, greeting = stack.enter_context(serving("demo", *FLAGS))
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


async def _measure(
    ways: dict[str, BenchTarget], load: RandomLoad, arguments: argparse.Namespace
) -> Mapping[str, Rounds]:
    """The ways take turns. Round 0 is not measured."""
    rng = random.Random(0)
    rest = load.conversations()
    turn = Turn(rest, ClosedLoop(arguments.concurrency), -(-arguments.requests // arguments.rounds))
    measured: dict[str, list[list[float]]] = {name: [] for name in ways}
    for number in range(1 + arguments.rounds):
        for name in rng.sample([*ways], len(ways)):
            report = await run(turn, ways[name])
            times = [1e3 * record.ttft_s for record in report.ok if record.ttft_s is not None]
            assert len(times) == len(report.records), (name, report.failures, report.records[0].error)
            if number:
                measured[name].append(times)
        if number and number % -(-arguments.rounds // NUM_LINES) == 0:
            p50s = "".join(f"{_quantile(rounds, 0.5):20.2f}" for rounds in measured.values())
            print(f"{number:<8}{p50s}", flush=True)
    return measured


def _report(measured: Mapping[str, Rounds]) -> None:
    """Prints each way's times, and how much longer they are than those of the direct ways."""
    print(f"\n{'ms to the first text':24}{'requests':>10}{'p50':>10}{'p99':>10}")
    for name, rounds in measured.items():
        count = sum(map(len, rounds))
        print(f"{name:24}{count:10,}{_quantile(rounds, 0.5):10.2f}{_quantile(rounds, 0.99):10.2f}")
    for base, compared in BASES.items():
        if not (names := [name for name in compared if name in measured]):
            continue
        print(f"{f'more than {base}, ms':24}{'p50':>10}{'95 % interval':>20}{'p99':>10}{'95 % interval':>20}")
        for name in names:
            parts = (_difference(measured[name], measured[base], share) for share in (0.5, 0.99))
            print(
                f"{name:24}" + "".join(f"{more:+10.2f}{f'{low:+.2f} to {high:+.2f}':>20}" for more, low, high in parts)
            )
    print(flush=True)


def _quantile(rounds: Rounds, share: float) -> float:
    return quantile(sorted(itertools.chain(*rounds)), share)


def _difference(rounds: Rounds, base: Rounds, share: float) -> tuple[float, float, float]:
    """Returns how much greater a quantile is, and the interval that 95 % of resampled rounds give."""
    rng = random.Random(0)
    pairs = [*zip(rounds, base, strict=True)]
    resampled = []
    for _ in range(NUM_RESAMPLES):
        left, right = zip(*rng.choices(pairs, k=len(pairs)), strict=True)
        resampled.append(_quantile(left, share) - _quantile(right, share))
    resampled.sort()
    return (
        _quantile(rounds, share) - _quantile(base, share),
        quantile(resampled, 0.025),
        quantile(resampled, 0.975),
    )


if __name__ == "__main__":
    sys.exit(main())

"""What traces cost: tokens per second and CPU, with 10 % of requests sampled and sent to a collector.

Three services with the demo model and an HTTP gateway take turns, by gRPC and by OpenAI's API: two without traces,
which show what is noise, and one with them. The collector is a process on the same cores that accepts every export
unread, and counts the spans at the end.
"""

import argparse
import os
import runpy
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp

from penstock.clients.bench.grpc_target import GrpcCaller
from penstock.clients.bench.lengths import Uniform
from penstock.clients.bench.runner import run
from penstock.clients.bench.workload import DEFAULT_OPTIONS, ClosedLoop, RandomLoad
from penstock.clients.cli.options import ConnectionOptions

GATEWAY = runpy.run_path(str(Path(__file__).with_name("gateway.py")))
GRPC, HTTP = GATEWAY["GRPC"], GATEWAY["HTTP"]
OUTPUT_TOKENS = 32
"""Few, so that there are many requests, each of which may have spans."""
SAMPLED_SHARE = 0.1
TARGET = 0.02
PLAIN = "without traces"
EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass(frozen=True)
class Round:
    """What was measured of one service."""

    num_requests: int
    seconds: float
    cpu_s: float
    """What the service, its worker and its gateway took."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_requests * OUTPUT_TOKENS / self.seconds

    @property
    def cpu_ms(self) -> float:
        """Of each request."""
        return self.cpu_s * 1e3 / self.num_requests


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for each way to call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=[GRPC, HTTP], default=[GRPC, HTTP])
    parser.add_argument("--pairs", type=int, default=7, help="rounds of each service, for each way (default: 7)")
    parser.add_argument("--requests", type=int, default=2048, help="in each round (default: 2048)")
    parser.add_argument("--turns", type=int, default=8, help="in each round (default: 8)")
    parser.add_argument("--streams", type=int, default=64, help="at a time (default: 64)")
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.collect:
        collect()
        return
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        settings = {PLAIN: {}, "without traces, again": {}, f"{SAMPLED_SHARE:.0%} sampled": telemetry(collector)}
        services = {name: stack.enter_context(serving(environment)) for name, environment in settings.items()}
        for way in arguments.ways:
            report(way, uvloop.run(measure(services, way, arguments)), arguments)


def telemetry(target: str) -> dict[str, str]:
    """The environment of a service that sends traces."""
    return {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://{target}",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(SAMPLED_SHARE),
    }


async def measure(services: dict[str, Any], way: str, arguments: argparse.Namespace) -> dict[str, list[Round]]:
    """Rounds of each service, whose turns alternate: the machine's speed changes within minutes. Which is first
    changes."""
    for service in services.values():  # whatever is made at the first request
        await measure_turn(service, way, arguments.streams, arguments.streams)
    rounds: dict[str, list[Round]] = {name: [] for name in services}
    for _ in range(arguments.pairs):
        turns: dict[str, list[Round]] = {name: [] for name in services}
        for number in range(arguments.turns):
            order = [*services][number % len(services) :] + [*services][: number % len(services)]
            for name in order:
                turn = await measure_turn(services[name], way, arguments.requests // arguments.turns, arguments.streams)
                turns[name].append(turn)
        for name, parts in turns.items():
            rounds[name].append(Round(*(sum(values) for values in zip(*map(astuple, parts), strict=True))))
    return rounds


async def measure_turn(service: Any, way: str, num_requests: int, num_streams: int) -> Round:
    """A part of a round."""
    load = RandomLoad(
        vocab_size=GATEWAY["VOCAB_SIZE"],
        arrivals=ClosedLoop(num_streams),
        num_requests=num_requests,
        prompt_tokens=Uniform(GATEWAY["PROMPT_TOKENS"], GATEWAY["PROMPT_TOKENS"]),
        output_tokens=Uniform(OUTPUT_TOKENS, OUTPUT_TOKENS),
        options={**DEFAULT_OPTIONS, "format": "text_and_token_ids"} if way == GRPC else DEFAULT_OPTIONS,
    )
    async with GrpcCaller(ConnectionOptions(service.target)) as grpc_caller:
        before = service.cpu_s()
        done = await run(load, grpc_caller if way == GRPC else GATEWAY["HttpCaller"](service.http))
        after = service.cpu_s()
    assert [record.output_tokens for record in done.ok] == [OUTPUT_TOKENS] * num_requests, done.failures
    cpu_s = sum(after[name] - before[name] for name in after if name != "client")
    return Round(num_requests, done.seconds, cpu_s)


def report(way: str, rounds: dict[str, list[Round]], arguments: argparse.Namespace) -> None:
    """The medians of each service, and what each takes more than the first in the median of the pairs."""
    print(
        f"{way}: {arguments.pairs} rounds of each service in {arguments.turns} turns, of {arguments.requests} requests "
        f"of {OUTPUT_TOKENS} tokens, {arguments.streams} at a time\n"
        f"  {'':24}{'tokens/s':>10}{'cost':>8}{'of pairs':>20}{'CPU ms per request':>20}{'cost':>8}{'of pairs':>20}"
    )
    for name, measured in rounds.items():
        pairs = [*zip(rounds[PLAIN], measured, strict=True)]
        slower = [1 - other.tokens_per_s / plain.tokens_per_s for plain, other in pairs]
        more = [other.cpu_ms / plain.cpu_ms - 1 for plain, other in pairs]
        speed = statistics.median(each.tokens_per_s for each in measured)
        cpu_ms = statistics.median(each.cpu_ms for each in measured)
        print(f"  {name:24}{speed:10,.0f}{described(slower)}{cpu_ms:20.2f}{described(more)}")
    print(f"  wanted: under {TARGET:.0%}; what the second service costs is noise", flush=True)


def described(costs: list[float]) -> str:
    """The median and the range."""
    return f"{statistics.median(costs):8.1%}{f'{min(costs):.1%} to {max(costs):.1%}':>20}"


@contextmanager
def serving(environment: dict[str, str]) -> Iterator[Any]:
    """A service of the demo model, with these of OpenTelemetry's variables and no others."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    os.environ.update(environment)
    with GATEWAY["serving"]("demo") as service:
        os.environ.clear()
        os.environ.update(before)
        yield service


@contextmanager
def collecting() -> Iterator[str]:
    """A collector in a process of its own; its address. At the end it prints how many spans it got."""
    command = [sys.executable, "-P", __file__, "--collect"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        printed, _ = process.communicate()
        print(printed, end="", flush=True)


def collect() -> None:
    """Accepts exports until the standard input ends."""
    exports: list[bytes] = []

    def accept(request: bytes, context: grpc.ServicerContext) -> bytes:
        exports.append(request)
        return b""  # a response without fields

    handler = grpc.method_handlers_generic_handler(EXPORT, {"Export": grpc.unary_unary_rpc_method_handler(accept)})
    server = grpc.server(ThreadPoolExecutor(1), handlers=[handler])
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    server.start()
    sys.stdin.read()
    server.stop(None).wait()
    num_spans = 0
    for export in exports:
        for resource in otlp.ExportTraceServiceRequest.FromString(export).resource_spans:
            num_spans += sum(len(scope.spans) for scope in resource.scope_spans)
    print(f"the collector got {num_spans:,} spans in {len(exports):,} exports")


if __name__ == "__main__":
    main()

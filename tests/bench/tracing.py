"""What traces cost: tokens per second without them, and with 10 % of requests sampled and sent to a collector.

Two services with the demo model and an HTTP gateway, one with each setting, take turns: a round of one, then the same
round of the other, in pairs, by gRPC and by OpenAI's API. The collector is a process on the same cores that accepts
every export unread, and counts the spans at the end.
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
EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for each way to call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="of rounds, for each way (default: 7)")
    parser.add_argument("--requests", type=int, default=2048, help="in each round (default: 2048)")
    parser.add_argument("--streams", type=int, default=64, help="at a time (default: 64)")
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.collect:
        collect()
        return
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        plain = stack.enter_context(serving({}))
        traced = stack.enter_context(serving(telemetry(collector)))
        for way in (GRPC, HTTP):
            pairs = uvloop.run(measure(plain, traced, way, arguments))
            report(way, pairs, arguments)


def telemetry(target: str) -> dict[str, str]:
    """The environment of a service that sends traces."""
    return {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://{target}",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(SAMPLED_SHARE),
    }


async def measure(plain: Any, traced: Any, way: str, arguments: argparse.Namespace) -> list[tuple[float, float]]:
    """The tokens per second of each pair: without traces, and with them. The first of a pair changes."""
    for service in (plain, traced):
        await tokens_per_s(service, way, arguments.streams, arguments.streams)  # whatever is made at the first request
    pairs = []
    for number in range(arguments.pairs):
        order = (plain, traced) if number % 2 == 0 else (traced, plain)
        speeds = {id(each): await tokens_per_s(each, way, arguments.requests, arguments.streams) for each in order}
        pairs.append((speeds[id(plain)], speeds[id(traced)]))
    return pairs


async def tokens_per_s(service: Any, way: str, num_requests: int, num_streams: int) -> float:
    """One round."""
    load = RandomLoad(
        vocab_size=GATEWAY["VOCAB_SIZE"],
        arrivals=ClosedLoop(num_streams),
        num_requests=num_requests,
        prompt_tokens=Uniform(GATEWAY["PROMPT_TOKENS"], GATEWAY["PROMPT_TOKENS"]),
        output_tokens=Uniform(OUTPUT_TOKENS, OUTPUT_TOKENS),
        options={**DEFAULT_OPTIONS, "format": "text_and_token_ids"} if way == GRPC else DEFAULT_OPTIONS,
    )
    async with GrpcCaller(ConnectionOptions(service.target)) as grpc_caller:
        done = await run(load, grpc_caller if way == GRPC else GATEWAY["HttpCaller"](service.http))
    assert len(done.ok) == num_requests, done.failures
    return sum(record.output_tokens for record in done.ok) / done.seconds


def report(way: str, pairs: list[tuple[float, float]], arguments: argparse.Namespace) -> None:
    """The medians of the speeds, and the cost by pairs."""
    plain, traced = (statistics.median(speeds) for speeds in zip(*pairs, strict=True))
    costs = [1 - with_traces / without for without, with_traces in pairs]
    print(
        f"{way}: {len(pairs)} pairs of {arguments.requests} requests of {OUTPUT_TOKENS} tokens, "
        f"{arguments.streams} at a time\n"
        f"  tokens/s: {plain:,.0f} without traces, {traced:,.0f} with {SAMPLED_SHARE:.0%} sampled\n"
        f"  traces cost {statistics.median(costs):.1%} in the median of the pairs, {min(costs):.1%} to "
        f"{max(costs):.1%} (wanted: under {TARGET:.0%})",
        flush=True,
    )


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

"""Measures what `penstock bench` itself costs: the CPU time per token for each way to call a service, and the limit.

The services are separate processes: the real one over a fake worker, at 100 steps per second, and a bare HTTP
server that responds like vLLM. The limit is the number of tokens per second at which the client would use 80 % of a
core; above that it prints a warning.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop

from penstock.clients.bench.grpc_target import GrpcCaller
from penstock.clients.bench.lengths import Uniform
from penstock.clients.bench.openai_target import OpenAiCaller
from penstock.clients.bench.report import BUSY_SHARE
from penstock.clients.bench.runner import run
from penstock.clients.bench.workload import ClosedLoop, RandomLoad
from penstock.clients.cli.options import ConnectionOptions
from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.scheduler.testing.fake_worker import Slots
from penstock.service.app.server import Server
from penstock.service.app.server_config import ServerConfig
from penstock.service.text.tokenizer import Tokenizer

NUM_REQUESTS = 256
STEP_S = 0.01
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Way:
    """A way to call."""

    label: str
    service: str
    num_streams: int | None = 1


WAYS = (
    Way("Generate, 1 stream", "grpc"),
    Way("Generate, 4 streams", "grpc", 4),
    Way("GenerateOne, a call each", "grpc", None),
    Way("OpenAI's API, SSE", "sse"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="measured for so long, each time (default: 5)")
    parser.add_argument("--serve", choices=("grpc", "sse"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve is not None:
        uvloop.run(serve_grpc() if arguments.serve == "grpc" else serve_sse())
        return
    print(f"{NUM_REQUESTS} requests at a time, {arguments.seconds:g} s each")
    print(f"{'':28}{'tokens/s':>10}{'messages/s':>12}{'CPU':>8}{'us per token':>14}{'limit, tokens/s':>17}")
    for way in WAYS:
        with service(way.service) as target:
            print(f"{way.label:28}{uvloop.run(measure(way, target, arguments.seconds))}", flush=True)


async def measure(way: Way, target: str, seconds: float) -> str:
    """A line of the table."""
    num_tokens = max(1, int(seconds / STEP_S))
    load = RandomLoad(
        vocab_size=256,
        arrivals=ClosedLoop(NUM_REQUESTS),
        num_requests=NUM_REQUESTS,
        prompt_tokens=Uniform(PROMPT_TOKENS, PROMPT_TOKENS),
        output_tokens=Uniform(num_tokens, num_tokens),
    )
    async with caller(way, target) as call:
        report = await run(load, call)
    assert len(report.ok) == NUM_REQUESTS, report.failures
    tokens_per_s = sum(record.output_tokens for record in report.records) / report.seconds
    messages_per_s = sum(len(record.message_s) for record in report.records) / report.seconds
    share = report.client.process_share
    return (
        f"{tokens_per_s:10,.0f}{messages_per_s:12,.0f}{share:8.1%}{share / tokens_per_s * 1e6:14.2f}"
        f"{BUSY_SHARE / share * tokens_per_s:17,.0f}"
    )


def caller(way: Way, target: str) -> "GrpcCaller | OpenAiCaller":
    """The client's own."""
    if way.service == "sse":
        return OpenAiCaller(ConnectionOptions(target), model="fake")
    return GrpcCaller(ConnectionOptions(target), num_streams=way.num_streams)


@contextmanager
def service(kind: str) -> Iterator[str]:
    """A service in a process of its own; its address."""
    command = [sys.executable, "-P", __file__, "--serve", kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


async def serve_grpc() -> None:
    """The service over a fake worker; prints where it is."""
    tokenizer = Tokenizer(resolve_model(DEMO))
    executor = FakeExecutor(
        num_blocks=NUM_REQUESTS * 200,
        vocab_size=4096,
        next_token=lambda history, sampling: 1000 + len(history) % 26,
        slots=Slots,
        seconds_per_step=STEP_S,
    )
    scheduler = SchedulerConfig()
    config = ServerConfig(model_name="fake", listen="127.0.0.1:0", scheduler=scheduler)
    print(await Server(config, Engine(executor, scheduler), lambda: tokenizer).start(), flush=True)
    await asyncio.Event().wait()


async def serve_sse() -> None:
    """A server that answers every POST with a token per step, in vLLM's form; prints where it is."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print("http://{}:{}".format(*server.sockets[0].getsockname()), flush=True)
    await server.serve_forever()


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request of one connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
    max_tokens = json.loads(await reader.readexactly(length))["max_tokens"]
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    async for event in events(max_tokens):
        writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    writer.write(b"data: [DONE]\n\n")
    await writer.drain()
    writer.close()


async def events(num_tokens: int) -> AsyncIterator[dict[str, object]]:
    """One per step."""
    for i in range(num_tokens):
        await asyncio.sleep(STEP_S)
        finish = "length" if i == num_tokens - 1 else None
        choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish, "token_ids": [1000 + i % 26]}
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": i + 1, "total_tokens": PROMPT_TOKENS + i + 1}
        yield {"id": "cmpl-1", "object": "text_completion", "model": "fake", "choices": [choice], "usage": usage}


if __name__ == "__main__":
    main()

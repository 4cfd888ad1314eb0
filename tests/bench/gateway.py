"""What the HTTP gateway passes of a service's speed, and what CPU it takes: 64 streams, by gRPC and by OpenAI's API.

Both ways by turns against one `penstock serve --http-port`, on the demo model and on the shape of Qwen3-0.6B with made
up weights (M1), with text for every token. The load generator is on the same cores, so over HTTP it reads bytes and
parses the last event alone of each answer; its own CPU is told beside the others'.
"""

import argparse
import asyncio
import json
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop

from penstock.clients.bench.grpc_target import GrpcCaller
from penstock.clients.bench.lengths import Uniform
from penstock.clients.bench.runner import run
from penstock.clients.bench.target import OK, Record
from penstock.clients.bench.workload import DEFAULT_OPTIONS, BenchRequest, ClosedLoop, RandomLoad
from penstock.clients.cli.options import ConnectionOptions
from penstock.models.checkpoint.checkpoint import DEMO, resolve_model

NUM_STREAMS = 64
PROMPT_TOKENS = 16
VOCAB_SIZE = 4000
"""Ids below it are ordinary tokens of the demo's tokenizer, which both models have."""
TAIL_BYTES = 1024
"""Enough for the last event, which has the usage."""
GRPC, HTTP = "gRPC", "HTTP"
TARGET_ON_M1 = 0.97


@dataclass(frozen=True)
class Model:
    """What is served, and how many tokens a stream gets from it in a round."""

    name: str
    output_tokens: int
    target: float | None = None
    """The least share of gRPC's speed that is wanted."""


MODELS = (Model("demo", 400), Model("M1", 96, TARGET_ON_M1))


@dataclass(frozen=True)
class Serving:
    """A running service."""

    target: str
    http: str
    processes: dict[str, psutil.Process]
    """The service, its worker, the gateway, and the client, which is this process."""

    def cpu_s(self) -> dict[str, float]:
        """What each has taken so far."""
        times = {name: process.cpu_times() for name, process in self.processes.items()}
        return {name: each.user + each.system for name, each in times.items()}


@dataclass(frozen=True)
class Round:
    """One way, once."""

    tokens_per_s: float
    cpu_s: dict[str, float]
    """Of each process, for 1,000 tokens of output."""
    ttft_s: float
    """The median."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[model.name for model in MODELS], default=["demo", "M1"])
    parser.add_argument("--rounds", type=int, default=5, help="of each way (default: 5)")
    parser.add_argument("--streams", type=int, default=NUM_STREAMS, help=f"at a time (default: {NUM_STREAMS})")
    arguments = parser.parse_args(argv)
    for model in MODELS:
        if model.name in arguments.models:
            with serving(model.name) as service:
                rounds = uvloop.run(measure(service, model, arguments.rounds, arguments.streams))
            report(model, rounds, arguments.streams)


class HttpCaller:
    """Streams completions, and looks at no more of them than it must: who calls has a machine of their own."""

    def __init__(self, base: str) -> None:
        self._host, _, self._port = base.removeprefix("http://").rpartition(":")

    async def call(self, request: BenchRequest, past: Sequence[Record], record: Record) -> None:
        """A connection of its own for each; notes the first event, the last and the tokens of the usage."""
        body = json.dumps({
            "model": "served", "prompt": request.prompt_token_ids, "max_tokens": request.max_tokens, "stream": True,
            "stream_options": {"include_usage": True}, **request.options,
        })  # fmt: skip
        head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nConnection: close\r\n"
        answer = HttpAnswer()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: answer, self._host, int(self._port))
        transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        await answer.ended
        assert answer.head.startswith(b"HTTP/1.1 200"), answer.head
        counted = re.search(rb'"completion_tokens":(\d+)', answer.tail)
        assert counted is not None, answer.tail
        record.tokens(answer.first_s, (), int(counted[1]))
        record.ended_s, record.status = time.perf_counter(), OK


class HttpAnswer(asyncio.Protocol):
    """What comes on a connection, of which the beginning and the end are kept."""

    def __init__(self) -> None:
        self.head = self.tail = b""
        self.first_s = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """The head comes by itself, before the first event."""
        if not self.head:
            self.head = data
        elif not self.first_s:
            self.first_s = time.perf_counter()
        self.tail = (self.tail + data)[-TAIL_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        """All has come, or not."""
        self.ended.set_result(None)


async def measure(service: Serving, model: Model, num_rounds: int, num_streams: int) -> dict[str, list[Round]]:
    """The ways by turns, so that what changes on the machine changes for both."""
    rounds: dict[str, list[Round]] = {GRPC: [], HTTP: []}
    await call(service, HTTP, 4, num_streams)  # whatever is made at the first request
    for number in range(num_rounds):
        for way in (GRPC, HTTP) if number % 2 == 0 else (HTTP, GRPC):
            rounds[way].append(await call(service, way, model.output_tokens, num_streams))
    return rounds


async def call(service: Serving, way: str, output_tokens: int, num_streams: int) -> Round:
    """One round of one way."""
    load = RandomLoad(
        vocab_size=VOCAB_SIZE,
        arrivals=ClosedLoop(num_streams),
        num_requests=num_streams,
        prompt_tokens=Uniform(PROMPT_TOKENS, PROMPT_TOKENS),
        output_tokens=Uniform(output_tokens, output_tokens),
        # The client by gRPC counts ids; over HTTP the usage tells how many there were.
        options={**DEFAULT_OPTIONS, "format": "text_and_token_ids"} if way == GRPC else DEFAULT_OPTIONS,
    )
    async with GrpcCaller(ConnectionOptions(service.target)) as grpc_caller:
        before = service.cpu_s()
        done = await run(load, grpc_caller if way == GRPC else HttpCaller(service.http))
        after = service.cpu_s()
    assert len(done.ok) == num_streams, done.failures
    tokens = sum(record.output_tokens for record in done.ok)
    assert tokens == num_streams * output_tokens
    taken = {name: (after[name] - before[name]) * 1000 / tokens for name in after}
    first = statistics.median(record.ttft_s for record in done.ok if record.ttft_s is not None)
    return Round(tokens / done.seconds, taken, first)


def report(model: Model, rounds: dict[str, list[Round]], num_streams: int) -> None:
    """The medians, and what HTTP passes: by time, by rounds that followed each other, and by CPU, which others' work on
    the machine hardly changes."""
    num_rounds = len(rounds[GRPC])
    print(f"{model.name}: {num_streams} streams of {model.output_tokens} tokens, {num_rounds} rounds of each way")
    of_cpu = "CPU ms for 1,000 tokens: gateway"
    print(f"{'':8}{'tokens/s':>10}{'1st token':>12}{of_cpu:>36}{'service':>10}{'worker':>10}{'client':>10}")
    for way, measured in rounds.items():
        cpu = {name: 1e3 * statistics.median(each.cpu_s[name] for each in measured) for name in measured[0].cpu_s}
        speed = statistics.median(each.tokens_per_s for each in measured)
        first = statistics.median(each.ttft_s for each in measured)
        print(
            f"{way:8}{speed:10,.0f}{first * 1e3:9,.0f} ms"
            f"{cpu['gateway']:36,.1f}{cpu['service']:10,.1f}{cpu['worker']:10,.1f}{cpu['client']:10,.1f}"
        )
    ratios = [http.tokens_per_s / grpc.tokens_per_s for grpc, http in zip(rounds[GRPC], rounds[HTTP], strict=True)]
    seconds = {way: sum(1 / each.tokens_per_s for each in measured) for way, measured in rounds.items()}
    cpu_s = {way: sum(sum(each.cpu_s.values()) for each in measured) for way, measured in rounds.items()}
    wanted = "" if model.target is None else f" (wanted: at least {model.target:.0%})"
    print(f"HTTP passes {seconds[GRPC] / seconds[HTTP]:.1%} of gRPC's tokens in all rounds together{wanted}; "
          f"by pairs of rounds {min(ratios):.1%} to {max(ratios):.1%}, in the median {statistics.median(ratios):.1%}; "
          f"if all CPU were taken {cpu_s[GRPC] / cpu_s[HTTP]:.1%}\n", flush=True)  # fmt: skip


@contextmanager
def serving(name: str) -> Iterator[Serving]:
    """A service in a process of its own, and its children."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [DEMO]
        if name != DEMO:
            write_model(Path(folder))
            flags = [folder, "--load-format=dummy"]
        command = [
            str(Path(sys.executable).with_name("penstock")), "serve", *flags, "--served-model-name=served", "--port=0",
            "--http-port=0", "--max-model-len=1024", "--log-level=warning",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            greeting = ""
            while "Ctrl-C stops it." not in greeting:
                line = process.stdout.readline()
                assert line, "it never served"
                greeting += line
            target = re.search(r"serves \S+ on (\S+)", greeting)
            http = re.search(r"API at (\S+)/v1", greeting)
            assert target is not None
            assert http is not None
            yield Serving(target[1], http[1], family(process.pid))
        finally:
            process.terminate()
            process.communicate()


def family(pid: int) -> dict[str, psutil.Process]:
    """A service's processes by their parts."""
    service = psutil.Process(pid)
    found = {"service": service, "client": psutil.Process()}
    parts = {"http_child": "gateway", "penstock.models.worker": "worker"}
    for child in service.children():
        command = " ".join(child.cmdline())
        found |= {name: child for part, name in parts.items() if part in command}
    return found


def write_model(folder: Path) -> None:
    """M1's shape with the demo's tokenizer; its weights are made up."""
    runpy.run_path(str(Path(__file__).with_name("cpu_step.py")))["write_config"](folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model(DEMO) / name, folder)


if __name__ == "__main__":
    main()

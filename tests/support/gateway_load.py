"""A service with its HTTP gateway as processes, and a load of streamed completions, by gRPC or by OpenAI's API.

The load generator is on the same cores, so over HTTP it reads bytes and parses only the last event of each answer.
"""

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

from penstock.clients.bench.grpc_target import GrpcCaller
from penstock.clients.bench.lengths import Uniform
from penstock.clients.bench.runner import run
from penstock.clients.bench.target import OK, Record
from penstock.clients.bench.workload import DEFAULT_OPTIONS, BenchRequest, ClosedLoop, RandomLoad
from penstock.clients.cli.options import ConnectionOptions
from penstock.models.checkpoint.checkpoint import DEMO, resolve_model

PROMPT_TOKENS = 16
VOCAB_SIZE = 4000
"""Ids below it are ordinary tokens of the demo's tokenizer, which both models have."""
TAIL_BYTES = 1024
"""Enough for the last event, which has the usage."""
GRPC, HTTP, CHAT = "gRPC", "HTTP", "HTTP, chats"
"""The ways to call the service; over HTTP it continues texts unless the way names chats."""
_CPU_STEP = Path(__file__).parents[1] / "bench/cpu_step.py"


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


class HttpCaller:
    """Streams answers and reads as little of them as possible, as if the callers had machines of their own."""

    def __init__(self, base: str, *, chats: bool = False) -> None:
        self._host, _, self._port = base.removeprefix("http://").rpartition(":")
        self._chats = chats

    async def call(self, request: BenchRequest, past: Sequence[Record], record: Record) -> None:
        """Opens a connection for the request; notes when the first event and the end arrive, and the usage."""
        prompt: dict[str, object] = {"prompt": request.prompt_token_ids}
        if self._chats:
            prompt = {"messages": [{"role": "user", "content": " ".join(map(str, request.prompt_token_ids or ()))}]}
        body = json.dumps({
            "model": "served", **prompt, "max_tokens": request.max_tokens, "stream": True,
            "stream_options": {"include_usage": True}, **request.options,
        })  # fmt: skip
        path = "/v1/chat/completions" if self._chats else "/v1/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nConnection: close\r\n"
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
        done = await run(load, grpc_caller if way == GRPC else HttpCaller(service.http, chats=way == CHAT))
        after = service.cpu_s()
    assert len(done.ok) == num_streams, done.failures
    tokens = sum(record.output_tokens for record in done.ok)
    assert tokens == num_streams * output_tokens
    taken = {name: (after[name] - before[name]) * 1000 / tokens for name in after}
    first = statistics.median(record.ttft_s for record in done.ok if record.ttft_s is not None)
    return Round(tokens / done.seconds, taken, first)


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
    runpy.run_path(str(_CPU_STEP))["write_config"](folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model(DEMO) / name, folder)

"""What 256 streams of one request cost the engine, beside a worker that uses every core: against one stream of 256.

All of it real: `penstock serve` with the demo model, and a client that only notes when bytes come, on the same cores.
Prints tokens a second for each way, and by how much the time between tokens grows for the stream that it grows most
for. Both ways are measured several times, by turns, and the medians count.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock.v1 as pb
from penstock.clients.bench.report import quantile
from penstock.models.checkpoint.checkpoint import DEMO, resolve_model

NUM_REQUESTS = 256
TARGET_SHARE = 0.85
TARGET_GROWTH_MS = 60.0
SERVICE = "/penstock.v1.GenerationService/"

# HTTP/2 by hand: a client of gRPC's own would take a third of the cores that are measured.
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_MAX_WINDOW = (1 << 31) - 1


@dataclass
class Measured:
    """One run of one way."""

    tokens_per_s: float
    p50_ms: list[float]
    """Of each request: between the messages that bring it tokens."""
    p99_ms: list[float]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="measured for so long, each time (default: 4)")
    parser.add_argument("--rounds", type=int, default=2, help="how often both ways are measured (default: 2)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the worker (default: the cores)")
    parser.add_argument("--client", metavar="JSON", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.client is not None:
        print(json.dumps(vars(run_client(**json.loads(arguments.client)))))
        return
    print(f"{NUM_REQUESTS} requests, {arguments.threads} threads of the worker, {arguments.seconds:g} s each")
    with tempfile.TemporaryDirectory() as directory:
        wide = write_wide_model(Path(directory) / "wide")
        for label, flags in (
            ("the demo model", ["demo"]),
            ("twice as wide, so that a step uses every thread", [str(wide), "--load-format", "dummy"]),
        ):
            print(f"\n{label}\n{'':16}{'tokens/s':>10}{'between tokens, p50':>22}{'p99':>10}")
            found: dict[int, list[Measured]] = defaultdict(list)
            with service([*flags, "--threads", str(arguments.threads)]) as port:
                for _ in range(arguments.rounds):
                    for num_streams in (1, NUM_REQUESTS):
                        found[num_streams].append(measure(port, num_streams, arguments.seconds))
                        print(line(num_streams, found[num_streams][-1]), flush=True)
            report(found)


def write_wide_model(directory: Path) -> Path:
    """The demo model's shape, larger; its weights are made up."""
    shutil.copytree(resolve_model(DEMO), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    config |= {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "torch_dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def line(num_streams: int, measured: Measured) -> str:
    """A line of the table."""
    label = "on one stream" if num_streams == 1 else f"on {num_streams} streams"
    p50, p99 = statistics.median(measured.p50_ms), statistics.median(measured.p99_ms)
    return f"{label:16}{measured.tokens_per_s:10,.0f}{p50:19.1f} ms{p99:7.1f} ms"


def report(found: dict[int, list[Measured]]) -> None:
    """The figures and what they should be."""
    speed = {way: statistics.median(run.tokens_per_s for run in runs) for way, runs in found.items()}
    share = speed[NUM_REQUESTS] / speed[1]
    print(f"speed kept: {share:.0%} (target: {TARGET_SHARE:.0%}, {'met' if share >= TARGET_SHARE else 'NOT met'})")
    for name, of in (("p50", "p50_ms"), ("p99", "p99_ms")):
        alone = statistics.median(statistics.median(getattr(run, of)) for run in found[1])
        worst = statistics.median(max(getattr(run, of)) for run in found[NUM_REQUESTS])
        is_met = worst - alone <= TARGET_GROWTH_MS
        print(
            f"time between tokens, {name}: {worst - alone:+.1f} ms for the stream that it grows most for "
            f"(target: {TARGET_GROWTH_MS:g} ms, {'met' if is_met else 'NOT met'})"
        )


@contextmanager
def service(flags: Sequence[str]) -> Iterator[int]:
    """A service in a process of its own; its port."""
    program = str(Path(sys.executable).with_name("penstock"))
    command = [program, "serve", *flags, "--port", "0", "--log-level", "warning", "--kv-cache-memory-bytes", "1G"]
    command += ["--admin-listen", "off"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        match = re.search(r" on \S+:(\d+)$", process.stdout.readline().rstrip())
        assert match is not None, "the service did not start; run: penstock serve"
        yield int(match[1])
    finally:
        process.terminate()
        process.communicate()


def measure(port: int, num_streams: int, seconds: float) -> Measured:
    """By a client in a process of its own."""
    task = json.dumps({"port": port, "num_streams": num_streams, "seconds": seconds})
    command = [sys.executable, "-P", __file__, "--client", task]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return Measured(**json.loads(output))


def run_client(port: int, num_streams: int, seconds: float) -> Measured:
    """Opens streams, and from when all requests decode notes for some time when their tokens come."""
    connection = Connection(port)
    for _ in range(num_streams):
        starts = [start(ref) for ref in range(1, 1 + NUM_REQUESTS // num_streams)]
        if num_streams == 1:
            connection.open("Generate", [pb.GenerateRequest(start=one).SerializeToString() for one in starts])
        else:
            connection.open("GenerateOne", [pb.GenerateOneRequest(start=one).SerializeToString() for one in starts])
    kind: Any = pb.GenerateResponse if num_streams == 1 else pb.GenerateOneResponse
    num_messages: dict[tuple[int, int], int] = defaultdict(int)
    while len(num_messages) < NUM_REQUESTS or min(num_messages.values()) < 4:
        for stream, payload in connection.messages(connection.receive()):
            for delta in kind.FromString(payload).deltas:
                num_messages[stream, delta.ref] += 1
    # To look into it now would take from the cores that are measured.
    received = []
    begun = now = time.perf_counter()
    while now < begun + seconds:
        data = connection.receive()
        now = time.perf_counter()
        received.append((now, data))
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    num_tokens = 0
    for at, data in received:
        for stream, payload in connection.messages(data):
            for delta in kind.FromString(payload).deltas:
                times[stream, delta.ref].append(at)
                num_tokens += len(delta.token_ids)
    gaps = [sorted(1e3 * (b - a) for a, b in itertools.pairwise(seen)) for seen in times.values()]
    return Measured(num_tokens / (now - begun), [quantile(g, 0.5) for g in gaps], [quantile(g, 0.99) for g in gaps])


def start(ref: int) -> pb.GenerationStart:
    """A request that goes on for longer than is measured. Greedy: sampled tokens that end inside a character would be
    held back, and come two at a time."""
    sampling = pb.SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.0)
    return pb.GenerationStart(
        ref=ref,
        text="Once upon a time",
        sampling=sampling,
        output=pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS),
    )


class Connection:
    """The least of HTTP/2 that gRPC needs."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        # Nobody's window is ever full: what is not read stays in the socket.
        self._send(_SETTINGS, 0, 0, struct.pack(">HI", 4, _MAX_WINDOW))
        self._send(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _MAX_WINDOW - 65_535))
        self._next_stream = 1
        self._rest = b""
        """The beginning of a frame."""
        self._bodies: dict[int, bytes] = defaultdict(bytes)
        """Of each stream: the beginning of a message."""

    def open(self, method: str, messages: Sequence[bytes]) -> None:
        """A call, with all that is sent on it."""
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": SERVICE + method,
            ":authority": "localhost",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        block = b"".join(
            b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
            for name, value in fields.items()
        )
        self._send(_HEADERS, _END_HEADERS, self._next_stream, block)
        body = b"".join(b"\0" + struct.pack(">I", len(message)) + message for message in messages)
        for first in range(0, len(body), 16_384):
            is_last = first + 16_384 >= len(body)
            self._send(_DATA, _END_STREAM * is_last, self._next_stream, body[first : first + 16_384])
        self._next_stream += 2

    def receive(self) -> bytes:
        """What has come, once something has."""
        data = self._socket.recv(1 << 20)
        assert data, "the service has closed the connection"
        return data

    def messages(self, data: bytes) -> list[tuple[int, bytes]]:
        """Those that ``data`` ends, each with its stream."""
        found = []
        for kind, flags, stream, payload in self._frames(data):
            if kind == _DATA:
                body = self._bodies[stream] + payload
                while len(body) >= 5 and len(body) >= (end := 5 + int.from_bytes(body[1:5])):
                    found.append((stream, body[5:end]))
                    body = body[end:]
                self._bodies[stream] = body
            elif kind in (_SETTINGS, _PING) and not flags & _ACK:
                self._send(kind, _ACK, 0, payload if kind == _PING else b"")
        return found

    def _frames(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        data = self._rest + data
        at = 0
        while len(data) >= at + 9 and len(data) >= (end := at + 9 + int.from_bytes(data[at : at + 3])):
            yield data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9]), data[at + 9 : end]
            at = end
        self._rest = data[at:]

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._socket.sendall(struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload)


if __name__ == "__main__":
    main()

"""llama.cpp's llama-server, a process of its own, over HTTP with token ids."""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from cpu_bench.wire import Ran, Ready, Request, Wire, run_engine

SLOTS = 16
TOKENS_A_SLOT = 1280
START_LIMIT_S = 300.0


def main(wire: Wire, arguments: argparse.Namespace) -> None:
    """Starts the server, runs the sets, ends it."""
    version = subprocess.run([arguments.server, "--version"], capture_output=True, text=True, check=True)
    told = (version.stdout + version.stderr).strip().splitlines()[0]
    with _server(arguments) as (process, port, ready_s):
        wire.ready(Ready(f"llama.cpp {told.removeprefix('version: ')}", process.pid, ready_s))
        for requests in wire.sets():
            wire.answer(asyncio.run(_run(port, requests)))


@contextmanager
def _server(arguments: argparse.Namespace) -> "Iterator[tuple[subprocess.Popen[bytes], int, float]]":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    process = subprocess.Popen(
        [arguments.server, "-m", arguments.model, "--host", "127.0.0.1", "--port", str(port),
         "-t", str(arguments.threads), "-tb", str(arguments.threads), "-np", str(SLOTS),
         "-c", str(SLOTS * TOKENS_A_SLOT), "-b", "2048", "-ub", "512"],
        stdin=subprocess.DEVNULL, stdout=sys.stderr,
    )  # fmt: skip
    try:
        while not _is_healthy(port):
            if process.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {process.returncode}")
            if time.perf_counter() - began > START_LIMIT_S:
                raise RuntimeError(f"llama-server was not ready within {START_LIMIT_S:g} s")
            time.sleep(0.05)
        yield process, port, time.perf_counter() - began
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def _run(port: int, requests: list[Request]) -> Ran:
    began = time.perf_counter()
    events: list[list[tuple[float, int]]] = [[] for _ in requests]
    counts = await asyncio.gather(
        *(_stream(port, request, noted) for request, noted in zip(requests, events, strict=True))
    )
    # Tokens that end inside a character are streamed late or not at all; the server's own count tells how many.
    for count, noted in zip(counts, events, strict=True):
        late = count - sum(tokens for _, tokens in noted)
        if late:
            noted.append((time.perf_counter(), late))
    return Ran(began, time.perf_counter(), events)


async def _stream(port: int, request: Request, events: list[tuple[float, int]]) -> int:
    """One request; returns how many tokens the server says it made."""
    prompt, num_output = request
    body = json.dumps({
        "prompt": prompt, "n_predict": num_output, "ignore_eos": True, "stream": True, "temperature": 0,
        "samplers": ["top_k"], "top_k": 1, "cache_prompt": True, "return_tokens": True,
    }).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    head = "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    count = 0
    while line := await reader.readline():
        if line.startswith(b"data: "):
            now = time.perf_counter()
            message = json.loads(line[6:])
            if "error" in message:
                raise RuntimeError(str(message["error"]))
            if message.get("tokens"):
                events.append((now, len(message["tokens"])))
            if message.get("stop"):
                count = message["tokens_predicted"]
        elif b'"error"' in line:
            raise RuntimeError(line.decode())
    writer.close()
    return count


if __name__ == "__main__":
    run_engine(main, server="llama-server")

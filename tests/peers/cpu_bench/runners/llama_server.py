"""The llama-server of llama.cpp, or of a fork of it, as a process of its own, over HTTP with token ids."""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cpu_bench.schedule import UNKNOWN_ID, AddTokens, Arrival, send_all
from cpu_bench.wire import Ran, Ready, Wire, Work, run_engine

START_LIMIT_S = 300.0


def main(wire: Wire, arguments: argparse.Namespace) -> None:
    """Starts the server, runs the sets, ends it."""
    version = subprocess.run([arguments.server, "--version"], capture_output=True, text=True, check=True)
    told = (version.stdout + version.stderr).strip().splitlines()[0]
    vocabulary = json.loads(Path(arguments.tokenizer).read_text(encoding="utf-8"))["model"]["vocab"]
    with _server(arguments) as (process, port, ready_s):
        wire.ready(Ready(f"{arguments.name} {told.removeprefix('version: ')}", process.pid, ready_s))
        for work in wire.sets():
            wire.answer(asyncio.run(_run(port, work, vocabulary)))


@contextmanager
def _server(arguments: argparse.Namespace) -> "Iterator[tuple[subprocess.Popen[bytes], int, float]]":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    process = subprocess.Popen(
        [arguments.server, "-m", arguments.model, "--host", "127.0.0.1", "--port", str(port),
         "-t", str(arguments.threads), "-tb", str(arguments.threads), "-np", arguments.slots,
         "-c", str(int(arguments.slots) * int(arguments.slot_tokens)), "-b", "2048", "-ub", "512",
         *arguments.more.split()],
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


async def _run(port: int, work: Work, vocabulary: Mapping[str, int]) -> Ran:
    async def generate(arrival: Arrival, add_tokens: AddTokens) -> None:
        await _stream(port, arrival, add_tokens, vocabulary)

    return (await send_all(work, generate)).ran()


async def _stream(port: int, arrival: Arrival, add_tokens: AddTokens, vocabulary: Mapping[str, int]) -> None:
    body = json.dumps({
        "prompt": arrival.prompt, "n_predict": arrival.num_output, "ignore_eos": True, "stream": True, "temperature": 0,
        "samplers": ["top_k"], "top_k": 1, "cache_prompt": True, "return_tokens": True,
    }).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    try:
        head = "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        await _read_tokens(reader, add_tokens, vocabulary)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _read_tokens(reader: asyncio.StreamReader, add_tokens: AddTokens, vocabulary: Mapping[str, int]) -> None:
    count = 0
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            message = json.loads(line[6:])
            if "error" in message:
                raise RuntimeError(str(message["error"]))
            ids = ids_of(message, vocabulary)
            add_tokens(ids)
            count += len(ids)
            if message.get("stop"):
                # Tokens that end inside a character are streamed late or not at all; the server's count includes them.
                add_tokens([UNKNOWN_ID] * (message["tokens_predicted"] - count))
        elif b'"error"' in line:
            raise RuntimeError(line.decode())


def ids_of(message: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[int]:
    """Returns the ids that a message of the stream brings. ik_llama.cpp sends only the text, of one token a message."""
    if "tokens" in message:
        return list(message["tokens"])
    text = message.get("content")
    return [vocabulary.get(text, UNKNOWN_ID)] if text else []


if __name__ == "__main__":
    run_engine(main, server="", tokenizer="", name="llama.cpp", slots="16", slot_tokens="1280", more="")

"""Ours: `penstock serve` as a process of its own with its default settings, and its Python client over loopback."""

import argparse
import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import grpc

from cpu_bench.wire import Ran, Ready, Request, Wire, run_engine
from penstock.clients import AsyncClient, Delta

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
PROBE_EVERY_S = 0.05
MIN_PROBES = 100
START_LIMIT_S = 300.0


def main(wire: Wire, arguments: argparse.Namespace) -> None:
    """Starts the service, runs the sets, ends it."""
    flags = ["--quantization", arguments.quantization] if arguments.quantization else []
    with _service(arguments.model, flags) as (process, target, ready_s):
        wire.ready(Ready(f"penstock {version('penstock')}", process.pid, ready_s))
        asyncio.run(_serve(wire, target))


@contextmanager
def _service(model: str, flags: list[str]) -> "Iterator[tuple[subprocess.Popen[str], str, float]]":
    """The service, its target, and the seconds from its start to SERVING."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [Path(sys.executable).with_name("penstock"), "serve", model, "--port", "0", *flags],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = re.search(r"127\.0\.0\.1:\d+", process.stdout.readline())
        if found is None:
            raise RuntimeError(f"penstock serve ended with status {process.wait()}")
        asyncio.run(_wait_ready(found[0]))
        yield process, found[0], time.perf_counter() - began
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _wait_ready(target: str) -> None:
    async with AsyncClient(target) as client:
        await client.wait_ready(START_LIMIT_S)


async def _serve(wire: Wire, target: str) -> None:
    sets = wire.sets()
    async with AsyncClient(target) as client:
        while (requests := await asyncio.to_thread(next, sets, None)) is not None:
            with Probe(target) as probe:
                began = time.perf_counter()
                events = await asyncio.gather(*(_one(client, request) for request in requests))
                ended = time.perf_counter()
            wire.answer(Ran(began, ended, list(events), probe.figures()))


async def _one(client: AsyncClient, request: Request) -> list[tuple[float, int]]:
    prompt, num_output = request
    call = client.generate(prompt, max_tokens=num_output, temperature=0.0, ignore_eos=True, format="token_ids")
    return [
        (time.perf_counter(), len(event.token_ids))
        async for event in call
        if isinstance(event, Delta) and event.token_ids
    ]


class Probe:
    """Asks the service for its health all the time, on a connection and a thread of its own.

    The service's event loop answers, so no answer comes sooner than the loop's lag: an upper bound of it.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._ended = threading.Event()
        self._times: list[float] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Probe":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def figures(self) -> dict[str, float]:
        """Of all the answers; none of so few that no 99th part could be told."""
        times = sorted(self._times)
        return {"health_p99_ms": times[int(len(times) * 0.99)] * 1000} if len(times) >= MIN_PROBES else {}

    def _run(self) -> None:
        with grpc.insecure_channel(self._target) as channel:
            check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH_CHECK)
            check(b"", timeout=60)
            while not self._ended.wait(PROBE_EVERY_S):
                began = time.perf_counter()
                check(b"", timeout=60)
                self._times.append(time.perf_counter() - began)


if __name__ == "__main__":
    run_engine(main, quantization="")

"""Ours: `penstock serve` as a process of its own on the CPU backend, with its default settings but no drafts, and its
Python client."""

import argparse
import asyncio
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import penstock.v1 as pb
from cpu_bench.schedule import AddTokens, Arrival, send_all
from cpu_bench.wire import Ready, Wire, run_engine
from penstock.clients import AsyncClient, Delta
from penstock.clients.cli.admin.client import AdminClient
from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.host.distribution import installed_version

LAG = "loop_lag_p99_ms"
WATCH_INTERVAL_S = 2.0
"""Long enough for a hundred samples, so that one may be longer than that at p99."""
START_LIMIT_S = 300.0
PENSTOCK = (str(Path(sys.executable).with_name("penstock")),)


def main(wire: Wire, arguments: argparse.Namespace) -> None:
    """Starts the service, runs the sets, ends it."""
    # Random weights repeat themselves greedily, which real models seldom do. Drafts would make that look fast.
    # The backend is named, since the default is the reference backend where the library is missing or was built from
    # other sources, at a third of the speed.
    flags = ["--speculative-config", "none", "--backend", "cpu"]
    flags += ["--quantization", arguments.quantization] if arguments.quantization else []
    with TemporaryDirectory() as folder, service(arguments.model, folder, flags) as (process, target, admin, ready_s):
        wire.ready(Ready(f"penstock {installed_version()}", process.pid, ready_s))
        asyncio.run(_serve(wire, target, admin))


@contextmanager
def service(
    model: str, folder: str, flags: Sequence[str], penstock: Sequence[str] = PENSTOCK
) -> "Iterator[tuple[subprocess.Popen[str], str, str, float]]":
    """The service, where it is for callers and for operators, and the seconds from its start to SERVING."""
    admin = f"unix:{folder}/admin"
    began = time.perf_counter()
    process = subprocess.Popen(
        [*penstock, "serve", model, "--port", "0", "--admin-listen", admin, *flags],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = re.search(r"127\.0\.0\.1:\d+", process.stdout.readline())
        if found is None:
            raise RuntimeError(f"penstock serve ended with status {process.wait()}")
        asyncio.run(_wait_ready(found[0]))
        yield process, found[0], admin, time.perf_counter() - began
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


async def _serve(wire: Wire, target: str, admin: str) -> None:
    sets = wire.sets()
    async with AsyncClient(target) as client:

        async def generate(arrival: Arrival, add_tokens: AddTokens) -> None:
            call = client.generate(
                arrival.prompt, max_tokens=arrival.num_output, temperature=0.0, ignore_eos=True, format="token_ids"
            )
            async for event in call:
                if isinstance(event, Delta):
                    add_tokens(event.token_ids)

        while (work := await asyncio.to_thread(next, sets, None)) is not None:
            async with loop_lag(admin) as figures:
                schedule = await send_all(work, generate)
                ran = schedule.ran(figures)
            wire.answer(ran)


@asynccontextmanager
async def loop_lag(admin: str) -> AsyncIterator[dict[str, float]]:
    """What becomes the service's figure: its event loop's lag at p99, in milliseconds, in the worst of the intervals
    that end meanwhile. Stays empty where none does."""
    figures: dict[str, float] = {}
    async with (
        AdminClient.opened(ConnectionOptions(admin)) as client,
        aclosing(client.watch_stats(WATCH_INTERVAL_S)) as answers,
    ):
        await anext(answers)  # of the time before
        watching = asyncio.create_task(_keep_worst(answers, figures))
        try:
            yield figures
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


async def _keep_worst(answers: AsyncIterator[pb.WatchStatsResponse], figures: dict[str, float]) -> None:
    async for stats in answers:
        figures[LAG] = max(stats.loop_lag.p99.ToMicroseconds() / 1000, figures.get(LAG, 0.0))


if __name__ == "__main__":
    run_engine(main, quantization="")

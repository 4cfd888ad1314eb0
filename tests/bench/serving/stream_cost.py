"""What streams cost the service's event loop, at 100 steps a second, over a fake worker.

Prints the loop's share of a core and the time from token to write, for 256 requests on one stream and on 256 streams;
then what 20 streams that nobody reads do to the time between another stream's tokens. The client is a process of its
own.
"""

import argparse
import asyncio
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import tokenizers
import uvloop

import penstock.v1 as pb
from penstock.clients.bench.report import quantile
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.plan import StepPlan, StepResult
from penstock.scheduler.request import SequenceDelta
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.scheduler.testing.fake_worker import Slots
from penstock.service.app.server import Server
from penstock.service.app.server_config import ServerConfig
from penstock.service.rpc import generation
from penstock.service.streaming.outbox import Outbox
from penstock.service.streaming.pending_message import OutputForm
from penstock.service.text.tokenizer import Tokenizer

STEPS_PER_SECOND = 100
NUM_REQUESTS = 256
NUM_STALLED = 20
METHOD = "/penstock.v1.GenerationService/Generate"


class PacedExecutor(FakeExecutor):
    """Answers at fixed times, and notes what it costs the loop itself, which a worker process would not."""

    def __init__(self) -> None:
        super().__init__(
            num_blocks=NUM_REQUESTS * 300,
            vocab_size=258,
            next_token=lambda history, sampling: ord("a") + len(history) % 26,
            slots=Slots,
        )
        self.own_cpu_s = 0.0
        run = self._worker.run

        def timed_run(plan: StepPlan) -> StepResult:
            started = time.thread_time()
            result = run(plan)
            self.own_cpu_s += time.thread_time() - started
            return result

        self._worker.run = timed_run  # type: ignore[method-assign]

    async def results(self) -> AsyncIterator[StepResult]:
        """One each 10 ms."""
        due = time.monotonic()
        async for result in super().results():
            due = max(due + 1 / STEPS_PER_SECOND, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            yield result


class MeasuredOutbox(Outbox):
    """An outbox that notes how long its oldest token waited, for each message."""

    waits: list[float] = []  # noqa: RUF012 - of all outboxes of a run

    open: set["MeasuredOutbox"] = set()  # noqa: RUF012

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._oldest: float | None = None

    async def run(self) -> None:
        """Counts as open."""
        self.open.add(self)
        try:
            await super().run()
        finally:
            self.open.discard(self)

    @property
    def is_held_up(self) -> bool:
        """Whether its reader holds it up."""
        return self._writer is not None

    def delta(self, ref: int, delta: SequenceDelta, form: OutputForm, at_once: bool) -> None:
        """Notes when the oldest token came."""
        if self._oldest is None:
            self._oldest = time.perf_counter()
        super().delta(ref, delta, form, at_once)

    async def _write_next(self, task: "asyncio.Task[None]") -> None:
        if self._oldest is not None:
            self.waits.append(time.perf_counter() - self._oldest)
            self._oldest = None
        await super()._write_next(task)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="measured for so long, each time (default: 4)")
    parser.add_argument("--client", metavar="JSON", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.client is not None:
        uvloop.run(client(**json.loads(arguments.client)))
    else:
        uvloop.run(benchmark(arguments.seconds))


async def benchmark(seconds: float) -> None:
    """Runs each load against a service of its own."""
    vars(generation)["Outbox"] = MeasuredOutbox
    # As Server.main_loop does it, for a process of its own.
    gc.freeze()
    gc.set_threshold(20_000, 10, 100)
    print(f"{NUM_REQUESTS} requests, {STEPS_PER_SECOND} steps a second, {seconds:g} s each")
    print(f"{'':24}{'loop':>8}{'process':>9}{'messages/s':>12}{'tokens/s':>10}{'token to write, p50':>21}{'p99':>9}")
    for label, num_streams in (("on one stream", 1), (f"on {NUM_REQUESTS} streams", NUM_REQUESTS)):
        print(f"{label:24}{await stream_cost(num_streams, seconds)}")
    print(f"\ntime between tokens of one stream, beside {NUM_STALLED} others")
    alone, _ = await time_between_tokens("none", seconds)
    print(f"{'alone':24}{alone * 1e3:8.2f} ms p50")
    for label, others in (("others are read", "read"), ("others are not read", "stalled")):
        p50, num_stalled = await time_between_tokens(others, seconds)
        print(f"{label:24}{p50 * 1e3:8.2f} ms p50, {100 * (p50 / alone - 1):+.1f} %; {num_stalled} writers are held up")


async def stream_cost(num_streams: int, seconds: float) -> str:
    """A line of the table."""
    measured: dict[str, float] = {}

    async def measure(target: str, engine: Engine, executor: PacedExecutor) -> None:
        await until_running(engine, NUM_REQUESTS)
        await asyncio.sleep(0.5)
        MeasuredOutbox.waits.clear()
        executor.own_cpu_s = 0.0
        started = time.perf_counter(), time.thread_time(), time.process_time(), engine.stats().decode_rows
        await asyncio.sleep(seconds)
        wall = time.perf_counter() - started[0]
        measured["loop"] = (time.thread_time() - started[1] - executor.own_cpu_s) / wall
        measured["process"] = (time.process_time() - started[2] - executor.own_cpu_s) / wall
        measured["tokens"] = (engine.stats().decode_rows - started[3]) / wall
        measured["messages"] = len(MeasuredOutbox.waits) / wall

    num_tokens = int((seconds + 30) * STEPS_PER_SECOND)
    task = {"num_streams": num_streams, "requests_each": NUM_REQUESTS // num_streams, "num_tokens": num_tokens}
    await with_service(measure, [task])
    waits = sorted(MeasuredOutbox.waits)
    p50, p99 = quantile(waits, 0.5), quantile(waits, 0.99)
    return (
        f"{measured['loop']:8.1%}{measured['process']:9.1%}{measured['messages']:12,.0f}{measured['tokens']:10,.0f}"
        f"{p50 * 1e3:18.2f} ms{p99 * 1e3:6.2f} ms"
    )


async def time_between_tokens(others: str, seconds: float) -> tuple[float, int]:
    """The median of one stream's, by its own client; and how many other streams were stalled at the end."""
    num_tokens = int((seconds + 30) * STEPS_PER_SECOND)
    tasks: list[dict[str, Any]] = []
    if others != "none":
        tasks.append(
            {"num_streams": NUM_STALLED, "requests_each": 4, "num_tokens": num_tokens, "reads": others == "read"}
        )
    result = 0.0, 0

    async def measure(target: str, engine: Engine, executor: PacedExecutor) -> None:
        nonlocal result
        await until_running(engine, 0 if others == "none" else 4 * NUM_STALLED)
        await asyncio.sleep(1.0)
        victim = {"num_streams": 1, "requests_each": 1, "num_tokens": int(seconds * STEPS_PER_SECOND)}
        process = start_client(target, victim)
        output = (await asyncio.to_thread(process.communicate))[0]
        result = float(output), sum(outbox.is_held_up for outbox in MeasuredOutbox.open)

    await with_service(measure, tasks)
    return result


async def with_service(
    measure: Callable[[str, Engine, PacedExecutor], Awaitable[None]], tasks: Sequence[dict[str, Any]]
) -> None:
    """A service on a free port, with clients, for as long as ``measure`` takes."""
    executor = PacedExecutor()
    scheduler = SchedulerConfig()
    engine = Engine(executor, scheduler)
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = byte_tokenizer(Path(directory))
    server = Server(
        ServerConfig(model_name="fake", listen="127.0.0.1:0", scheduler=scheduler), engine, lambda: tokenizer
    )
    target = await server.start()
    clients = [start_client(target, task) for task in tasks]
    try:
        await measure(target, engine, executor)
    finally:
        for process in clients:
            process.kill()
            process.communicate()
        await server.stop()


async def until_running(engine: Engine, num_requests: int) -> None:
    """Polls: the engine has no event for it."""
    while engine.stats().running < num_requests:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def start_client(target: str, task: dict[str, Any]) -> "subprocess.Popen[str]":
    """A client process."""
    command = [sys.executable, "-P", __file__, "--client", json.dumps({"target": target, **task})]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def client(target: str, num_streams: int, requests_each: int, num_tokens: int, reads: bool = True) -> None:
    """Opens streams and reads them, or not; prints the median time between messages."""
    options = [("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        open_stream: Callable[[], Any] = channel.stream_stream(METHOD, pb.GenerateRequest.SerializeToString)
        await asyncio.gather(*[one_stream(open_stream(), requests_each, num_tokens, reads) for _ in range(num_streams)])


async def one_stream(call: Any, num_requests: int, num_tokens: int, reads: bool) -> None:
    """Some requests on a stream."""
    sampling = pb.SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for ref in range(1, 1 + num_requests):
        start = pb.GenerationStart(
            ref=ref, text="token", sampling=sampling, output=pb.OutputOptions(logprobs=None if reads else 20)
        )
        await call.write(pb.GenerateRequest(start=start))
    await call.done_writing()
    if not reads:
        await asyncio.sleep(3600)
    times = []
    while await call.read() is not grpc.aio.EOF:
        times.append(time.perf_counter())
    if len(times) > 2:
        print(statistics.median(later - earlier for earlier, later in itertools.pairwise(times)))


def byte_tokenizer(directory: Path) -> Tokenizer:
    """Ids are bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


if __name__ == "__main__":
    main()

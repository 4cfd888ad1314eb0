"""``penstock serve`` when its worker is killed, stopped, runs out of memory or is ended by a request: streams go on,
health says so, and no process is left."""

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import until

import penstock.v1 as pb
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

PENSTOCK = Path(sys.executable).with_name("penstock")
SMALL = ("--max-model-len=4096", "--kv-cache-memory-bytes=64M", "--threads=1")
Health = health_pb2.HealthCheckResponse

DEADLY, HUNGRY = 5, 6
"""Prompts that begin with three of these end the worker, as ``DEADLY_WORKER`` has it."""
DEADLY_WORKER = """
import os, sys

def make_deadly(runner, marker):
    start_step = runner.start_step
    rows = {}

    def start_or_die(self, plan):
        rows.update((added.row, added.token_ids[:3]) for added in plan.added)
        prompts = [rows[planned.row] for planned in [*plan.chunks, *plan.decodes]]
        if [5] * 3 in prompts:
            os.abort()
        if [6] * 3 in prompts and not os.path.exists(marker):
            open(marker, "w").close()
            import resource
            resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
            bytearray(1 << 28)
        return start_step(self, plan)

    runner.start_step = start_or_die

if any("penstock.models.worker.main" in argument for argument in sys.orig_argv):
    from penstock.models.worker.runner import Runner
    make_deadly(Runner, __file__ + ".once")
"""
"""What Python runs at its start, where PYTHONPATH leads to it."""


def workers_of(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):
            found += [child] if "penstock.models.worker.main" in " ".join(child.cmdline()) else []
    return found


def has_ended(process: psutil.Process) -> bool:
    """Whoever inherited it may still have to reap it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@dataclass
class Life:
    """A service that runs, and when its health said what."""

    process: asyncio.subprocess.Process
    channel: grpc.aio.Channel
    load_s: float
    """Until it served for the first time."""
    health: list[tuple[float, int]] = field(default_factory=list)

    @property
    def worker(self) -> psutil.Process:
        (worker,) = workers_of(self.process.pid)
        return worker

    async def watch_health(self) -> None:
        with suppress(grpc.aio.AioRpcError):
            async for answer in health_pb2_grpc.HealthStub(self.channel).Watch(health_pb2.HealthCheckRequest()):
                self.health.append((time.monotonic(), answer.status))

    async def hurt(self, number: int) -> tuple[float, float]:
        """Sends the worker a signal; how long until health said NOT_SERVING, and then SERVING again."""
        seen, began = len(self.health), time.monotonic()
        self.worker.send_signal(number)
        await until(lambda: len(self.health) >= seen + 2)
        (down, not_serving), (up, serving) = self.health[seen : seen + 2]
        assert (not_serving, serving) == (Health.NOT_SERVING, Health.SERVING)
        return down - began, up - began


@asynccontextmanager
async def serving(*arguments: str, **env: str) -> AsyncIterator[Life]:
    """The demo model, served by a process of its own; it is ended with SIGTERM, and leaves no worker."""
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        PENSTOCK,
        *("serve", "--port=0", *SMALL, *arguments),
        stdout=asyncio.subprocess.PIPE,  # and no pipe for its log, which would be full after some thousand requests
        env={**os.environ, **env},
    )
    assert process.stdout is not None
    greeting = (await process.stdout.readline()).decode()
    assert " on 127.0.0.1:" in greeting, greeting
    target = greeting.split()[-1]
    try:
        async with grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            life = Life(process, channel, time.monotonic() - began)
            watching = asyncio.create_task(life.watch_health())
            await until(lambda: life.health)
            yield life
            watching.cancel()
        workers = workers_of(process.pid) if process.returncode is None else []
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.communicate(), 120)
        await until(lambda: all(map(has_ended, workers)))
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def frames(prompts: list[list[int]], temperature: float, max_tokens: int) -> list[pb.GenerateRequest]:
    return [
        pb.GenerateRequest(
            start=pb.GenerationStart(
                ref=ref,
                token_ids=pb.TokenIds(ids=prompt),
                sampling=pb.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=ref, ignore_eos=True),
                output=pb.OutputOptions(format=pb.OUTPUT_FORMAT_TOKEN_IDS),
            )
        )
        for ref, prompt in enumerate(prompts, start=1)
    ]


def prompts_of(count: int) -> list[list[int]]:
    return [
        [10 + (7 * number + position * number) % 300 for position in range(3 + number % 40)] for number in range(count)
    ]


class Streams:
    """Requests on one stream, and what came of them so far."""

    def __init__(self, life: Life, sent: list[pb.GenerateRequest], reading: Any) -> None:
        self.reading = reading
        self.call = GenerationServiceStub(life.channel).Generate(iter(sent))
        self._task = asyncio.create_task(reading.read(self.call))

    @property
    def num_tokens(self) -> int:
        return sum(len(outcome.token_ids) for outcome in self.reading.outcomes.values())

    async def until_accepted(self, count: int) -> None:
        """Waits until the service has accepted ``count`` requests, and one of them has its first token."""
        await until(lambda: len(self.reading.outcomes) == count and self.num_tokens)

    async def outputs(self) -> dict[int, list[int]]:
        """Of those that ended well; waits for all."""
        outcomes = (await self._task).outcomes
        return {ref: o.token_ids for ref, o in outcomes.items() if not o.finished[0].status.code}


@pytest.fixture
def deadly_path(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(DEADLY_WORKER)
    return str(tmp_path)


async def killed_under_streams(life, new_reading, num_streams, num_tokens, num_kills, temperature, patience=1.0):
    """Health follows within a second, service within the time of loading and 5 s, each times ``patience``; returns the
    outputs, undisturbed and not."""
    sent = frames(prompts_of(num_streams), temperature, num_tokens)
    undisturbed = await Streams(life, sent, new_reading()).outputs()
    streams = Streams(life, sent, new_reading())
    for kill in range(num_kills):
        goal = max(num_streams, streams.num_tokens + 1, (kill + 1) * num_streams * num_tokens // (num_kills + 2))
        while streams.num_tokens < goal:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        down, up = await life.hurt(signal.SIGKILL)
        assert down < patience
        assert up < patience * (life.load_s + 5)
    outputs = await streams.outputs()
    assert {len(ids) for ids in outputs.values()} == {num_tokens}
    assert len(outputs) == num_streams
    return undisturbed, outputs


@pytest.mark.timeout(300)
async def test_reliability_figures_4_and_10_killed_stopped_and_killed_amid_its_end(new_reading):
    async with serving("--dtype=float32") as life:
        undisturbed, outputs = await killed_under_streams(
            life, new_reading, 6, 150, 1, temperature=0.0, patience=math.inf
        )
        assert outputs == undisturbed

        streams = Streams(life, frames(prompts_of(6), 0.0, 150), new_reading())
        await streams.until_accepted(6)
        await life.hurt(signal.SIGSTOP)
        assert await streams.outputs() == undisturbed

        streams = Streams(life, frames(prompts_of(6), 0.0, 150), new_reading())
        await streams.until_accepted(6)
        life.worker.kill()
        await until(lambda: life.health[-1][1] == Health.NOT_SERVING)
        life.process.terminate()
        assert await streams.outputs() == undisturbed, [o.finished for o in streams.reading.outcomes.values()]
        assert await asyncio.wait_for(life.process.wait(), 120) == 0


async def one_killer_among(count, life, new_reading, num_tokens):
    prompts = prompts_of(count)
    prompts[count // 2] = [DEADLY] * 8
    streams = Streams(life, frames(prompts, 0.0, num_tokens), new_reading())
    outputs = await streams.outputs()
    assert {len(ids) for ids in outputs.values()} == {num_tokens}
    refused = {ref: o.finished[0].status for ref, o in streams.reading.outcomes.items() if ref not in outputs}
    assert list(refused) == [count // 2 + 1]
    (status,) = refused.values()
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert "crashed the worker twice" in status.message
    assert not any("RetryInfo" in detail.type_url for detail in status.details)


@pytest.mark.timeout(300)
async def test_reliability_figure_14_only_a_killer_is_refused(new_reading, deadly_path):
    """Then memory runs out once, which is survived; then the service is killed amid a restart, and leaves no worker."""
    async with serving("--dtype=float32", PYTHONPATH=deadly_path) as life:
        await one_killer_among(4, life, new_reading, 40)

        seen = len(life.health)
        outputs = await Streams(life, frames([[HUNGRY] * 4, [9]], 0.0, 30), new_reading()).outputs()
        assert {len(ids) for ids in outputs.values()} == {30}
        assert len(life.health) == seen + 2

        first = life.worker
        first.kill()
        await until(lambda: any(worker != first for worker in workers_of(life.process.pid)))
        workers = workers_of(life.process.pid)
        life.process.kill()
        await life.process.wait()
        await until(lambda: all(map(has_ended, workers)))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("dtype", "temperature"), [("float32", 0.0), ("float64", 1.0), ("bfloat16", 1.0)])
async def test_reliability_figure_4_64_streams_and_20_kills(new_reading, dtype, temperature):
    async with serving(f"--dtype={dtype}", "--kv-cache-memory-bytes=512M") as life:
        undisturbed, outputs = await killed_under_streams(life, new_reading, 64, 700, 20, temperature)
        assert dtype == "bfloat16" or outputs == undisturbed


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_reliability_figure_14_one_killer_among_64(new_reading, deadly_path):
    async with serving("--dtype=float32", PYTHONPATH=deadly_path) as life:
        await one_killer_among(64, life, new_reading, 200)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_reliability_figure_10_no_false_alarm_under_full_load(new_reading):
    """Ten minutes with a worker that wants all cores, beside the service and its client."""
    async with serving(f"--threads={os.cpu_count()}", "--kv-cache-memory-bytes=512M") as life:
        worker, end = life.worker, time.monotonic() + 600
        while time.monotonic() < end:
            await Streams(life, frames(prompts_of(64), 1.0, 500), new_reading()).outputs()
        assert life.worker == worker
        assert len(life.health) == 1

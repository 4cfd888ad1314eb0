"""Figure 13: readers that are stalled or slow cost others nothing: neither time nor, beyond a bound, memory."""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from waiting import until

import penstock.v1 as pb
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.scheduler.testing.fake_worker import Slots
from penstock.service.streaming import buffer_budget, outbox
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

SLOW_BYTES_PER_S = 1024
WITHIN_S = 120.0
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 16_384), ("grpc.http2.bdp_probe", 0)]
"""By default a client's library takes in megabytes that its user has not asked for."""


def start(ref: int = 1, max_tokens: int = 50_000, **fields: Any) -> pb.GenerationStart:
    sampling = pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerationStart(ref=ref, text="a", sampling=sampling, **fields)


@dataclass
class Reader:
    """A stream with one request."""

    call: Any
    text: str = ""
    code: grpc.StatusCode | None = None
    times: list[float] = field(default_factory=list)

    async def read(self, bytes_per_s: float = float("inf")) -> None:
        """To its end, not faster than that."""
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                self.times.append(time.perf_counter())
                self.text += "".join(delta.text for delta in message.deltas)
                await asyncio.sleep(message.ByteSize() / bytes_per_s)
            self.code = await self.call.code()
        except grpc.aio.AioRpcError as error:
            self.code = error.code()
        except asyncio.CancelledError:
            assert self.call.cancelled(), "by us, when the test ends"

    def check_text(self) -> None:
        """Nothing lost, nothing twice: the fake worker says the alphabet."""
        assert all((ord(b) - ord(a)) % 26 == 1 for a, b in itertools.pairwise(self.text))


@asynccontextmanager
async def streams(service: Any, number: int, **fields: Any) -> AsyncIterator[list[Reader]]:
    """Streams that nobody reads yet, each with a request that fills it fast."""
    async with grpc.aio.insecure_channel(service.target, options=SMALL_WINDOW) as channel:
        readers = []
        for _ in range(number):
            call: Any = GenerationServiceStub(channel).Generate()
            await call.write(pb.GenerateRequest(start=start(output=pb.OutputOptions(logprobs=20), **fields)))
            readers.append(Reader(call))
        yield readers
        for reader in readers:
            reader.call.cancel()


def num_stalled(service: Any) -> int:
    return sum(box.is_stalled for box in service.server._running.generation._outboxes)


async def rows_a_step(service: Any, num_steps: int) -> float:
    """How many rows decode in a step, from now on."""
    before = service.engine.stats()
    await until(lambda: service.engine.stats().steps >= before.steps + num_steps)
    after = service.engine.stats()
    return float((after.decode_rows - before.decode_rows) / (after.steps - before.steps))


def fast_service(seconds_per_step: float) -> FakeExecutor:
    return FakeExecutor(
        num_blocks=300_000,
        max_model_len=100_000,
        vocab_size=258,
        next_token=lambda history, sampling: ord("a") + len(history) % 26,
        seconds_per_step=seconds_per_step,
        slots=Slots,
    )


@pytest.fixture
def small(monkeypatch):
    """Bounds that a few streams reach at once."""
    monkeypatch.setattr(buffer_budget, "MAX_STREAM_BYTES", 100_000)
    monkeypatch.setattr(buffer_budget, "MAX_TOTAL_BYTES", 1_000_000)


async def test_reliability_figure_13_8_stalled_readers(start_service, small, monkeypatch):
    service = await start_service(fast_service(0.001))
    reader = Reader(service.generation.GenerateOne(pb.GenerateOneRequest(start=start())))
    reading = asyncio.create_task(reader.read())
    async with streams(service, 8) as stalled:
        await until(lambda: num_stalled(service) == 8)
        # Two plans were under way; from then on the one that is read is alone, and the others keep their place.
        assert await rows_a_step(service, 30) < 1.5
        assert service.engine.stats().requests == 9
        assert service.server._running.generation._buffer_budget.num_bytes < 1_500_000
        # One that is read again goes on at once, with all that it had missed.
        waking = asyncio.create_task(stalled[0].read())
        await until(lambda: len(stalled[0].text) > 3000)
        # A new request on a stream that is stalled waits as well.
        await stalled[1].call.write(pb.GenerateRequest(start=start(ref=2)))
        await until(lambda: service.engine.stats().requests == 10 or stalled[1].call.done())
        assert await rows_a_step(service, 30) < 2.5
        # Who takes nothing for long is cut off.
        monkeypatch.setattr(outbox, "STALLED_S", 0.3)
        async with streams(service, 2) as cut_off:
            await until(lambda: service.engine.stats().finished == 2)
            await asyncio.gather(*[one.read() for one in cut_off])
        assert {one.code for one in cut_off} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert {one.code for one in stalled} == {None}
    await waking
    reader.call.cancel()
    await reading
    await until(lambda: service.engine.stats().requests == 0)
    assert service.server._running.generation._buffer_budget.num_bytes == 0
    assert service.blocks_in_use == 0
    for one in (reader, *stalled, *cut_off):
        one.check_text()


async def p99_ms(readers: list[Reader], seconds: float) -> float:
    """Between the tokens of streams that are read, from now on."""
    begun = [len(reader.times) for reader in readers]
    await asyncio.sleep(seconds)
    gaps = [
        1e3 * (later - earlier)
        for reader, first in zip(readers, begun, strict=True)
        for earlier, later in itertools.pairwise(reader.times[first:])
    ]
    return sorted(gaps)[len(gaps) * 99 // 100]


@asynccontextmanager
async def clients_that_read_nothing(target: str, number: int) -> AsyncIterator[None]:
    """In a process of their own, whose memory is not the service's."""
    task = {"target": target, "num_streams": number, "requests_each": 1, "num_tokens": 50_000, "reads": False}
    script = Path(__file__).parents[2] / "bench" / "stream_cost.py"
    process = await asyncio.create_subprocess_exec(sys.executable, "-P", str(script), "--client", json.dumps(task))
    try:
        yield
    finally:
        process.kill()
        await process.wait()


@pytest.mark.soak
async def test_reliability_figure_13_100_stalled_readers_and_10_at_1_kb_a_second(start_service):
    service = await start_service(fast_service(0.01))
    process = psutil.Process()
    readers = [Reader(service.generation.GenerateOne(pb.GenerateOneRequest(start=start()))) for _ in range(8)]
    tasks = [asyncio.create_task(reader.read()) for reader in readers]
    await until(lambda: all(len(reader.times) > 200 for reader in readers))
    alone = min([await p99_ms(readers, 4) for _ in range(5)])
    memory = process.memory_info().rss
    async with streams(service, 10) as slow, clients_that_read_nothing(service.target, 100):
        tasks += [asyncio.create_task(one.read(SLOW_BYTES_PER_S)) for one in slow]
        began = time.monotonic()
        await until(lambda: num_stalled(service) >= 109)
        print(f"\nstalled after {time.monotonic() - began:.0f} s")
        beside = min([await p99_ms(readers, 4) for _ in range(5)])
        growth = process.memory_info().rss - memory
        print(f"p99 between tokens: alone {alone:.2f} ms, beside {beside:.2f} ms, {beside / alone - 1:+.1%}")
        print(f"memory: {growth / 1e6:+.0f} MB")
        assert beside < 1.1 * alone
        assert growth < 64e6
        async with asyncio.timeout(120):  # they are cut off, and none of the others is
            while service.engine.stats().finished < 100:  # noqa: ASYNC110
                await asyncio.sleep(1)
        assert {one.code for one in slow} == {None}
    for one in (*readers, *slow):
        one.call.cancel()
    await asyncio.gather(*tasks)
    for one in (*readers, *slow):
        one.check_text()

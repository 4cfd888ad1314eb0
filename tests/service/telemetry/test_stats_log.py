"""What the log says of the engine from time to time."""

import asyncio
import logging
import re

import pytest
from waiting import until

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.testing.fake_executor import FakeExecutor

NAME = "penstock.service.telemetry.stats_log"
LINE = re.compile(
    r"running (\d+), waiting (\d+), KV cache ([\d.]+) %; tokens/s: prompt (\d+), output (\d+); cached (\d+) %; "
    r"preempted (\d+)"
)


@pytest.fixture
def lines(caplog):
    """Reads what was logged so far, as numbers."""
    caplog.set_level(logging.INFO, NAME)

    def read():
        messages = [record.getMessage() for record in caplog.records if record.name == NAME]
        assert all(LINE.fullmatch(message) for message in messages), messages
        return [tuple(map(float, found)) for message in messages for found in LINE.findall(message)]

    return read


async def test_stats_are_logged_only_while_the_engine_is_busy(start_service, lines):
    executor = FakeExecutor(vocab_size=258, next_token=lambda history, sampling: ord("a"), seconds_per_step=0.002)
    service = await start_service(executor, SchedulerConfig(max_num_seqs=2), stats_interval_s=0.05)
    await asyncio.sleep(0.2)
    assert lines() == []

    start = pb.GenerationStart(text="x" * 64, sampling=pb.SamplingParams(max_tokens=3000, n=3))
    call = service.generation.GenerateOne(pb.GenerateOneRequest(start=start))
    await call.read()
    await until(lambda: len(lines()) >= 4)
    running, waiting, kv_percent, _, output, _, preempted = lines()[-1]
    assert (running, waiting, preempted) == (2, 1, 0)
    assert kv_percent > 0
    assert output > 0
    assert sum(prompt for _, _, _, prompt, *_ in lines()) > 0
    call.cancel()

    await until(lambda: not service.engine.stats().requests)
    told = -1
    while len(lines()) != told:  # one more line reports the last steps; then there are none
        told = len(lines())
        await asyncio.sleep(0.2)


async def test_cached_tokens_are_logged(start_service, lines):
    service = await start_service(stats_interval_s=0.3)
    request = pb.CompleteRequest(start=pb.GenerationStart(text="x" * 64, sampling=pb.SamplingParams(max_tokens=1)))
    await service.generation.Complete(request)
    await until(lambda: len(lines()) == 1)
    await service.generation.Complete(request)
    await until(lambda: len(lines()) == 2)
    (*_, first, _), (*_, second, _) = lines()
    assert first == 0
    assert second == 75  # three blocks of four; the last token has to be computed


async def test_a_stopped_server_logs_no_more_stats(start_service, lines):
    executor = FakeExecutor(vocab_size=258, next_token=lambda history, sampling: ord("a"), seconds_per_step=0.002)
    service = await start_service(executor, stats_interval_s=0.01)
    call = service.generation.GenerateOne(
        pb.GenerateOneRequest(start=pb.GenerationStart(text="hi", sampling=pb.SamplingParams(max_tokens=3000)))
    )
    await call.read()
    await until(lines)
    await service.server.stop()
    told = len(lines())
    await asyncio.sleep(0.1)
    assert len(lines()) == told

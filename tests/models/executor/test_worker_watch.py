"""A worker that ended, hangs or was stopped: found in time, reported as what it is, and started anew."""

import asyncio
import os
import signal
import time

import psutil
import pytest

from penstock.models.executor import process as launch
from penstock.models.executor.liveness import MemoryKills
from penstock.models.executor.process import WorkerProcess
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.plan import StepPlan
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.scheduler.worker_config import WorkerConfig

PLAN = StepPlan(0, [], [], [], [], [])


@pytest.fixture
def new_worker(without_model):
    """Workers without a model, that say that they live every ``interval`` seconds."""

    def new_worker(interval=0.5):
        without_model(interval)
        return WorkerProcess(WorkerConfig(model="none"))

    return new_worker


@pytest.fixture
async def worker(new_worker):
    process = new_worker()
    await process.start()
    yield process
    await process.stop()


async def end_of(worker):
    """What is said of its end."""
    with pytest.raises(ExecutorError) as caught:
        await anext(worker.results())
    return caught.value


async def works(worker):
    worker.submit(PLAN)
    return (await anext(worker.results())).step == PLAN.step


async def restarted(worker):
    """It works again after ``stop`` and ``start``."""
    await worker.stop()
    await worker.start()
    return await works(worker)


async def test_reliability_figure_10_a_stopped_worker_is_found_within_5_seconds(worker):
    pid = worker.pid
    assert await works(worker)
    os.kill(pid, signal.SIGSTOP)
    error = await end_of(worker)
    assert "stopped by a signal" in str(error)
    assert not error.blames_step
    assert await restarted(worker)
    assert not psutil.pid_exists(pid)


async def test_a_worker_that_is_stopped_while_it_loads_is_found_too(new_worker):
    process = new_worker()
    starting = asyncio.ensure_future(process.start())
    while process._link is None:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(ExecutorError, match="stopped by a signal"):
        await asyncio.wait_for(starting, 120)


async def test_a_worker_that_resumes_in_time_is_not_killed(worker):
    os.kill(worker.pid, signal.SIGSTOP)
    await asyncio.sleep(0.6)
    os.kill(worker.pid, signal.SIGCONT)
    assert await works(worker)


async def test_a_worker_that_gives_no_sign_of_life_is_to_blame(new_worker, monkeypatch):
    process = new_worker(interval=3600)
    await process.start()
    monkeypatch.setattr(launch, "MAX_SILENCE_S", 0.6)
    error = await end_of(process)
    assert "sent no heartbeat" in str(error)
    assert error.blames_step
    await process.stop()


async def test_time_that_our_own_loop_lost_is_not_held_against_the_worker(worker, monkeypatch):
    monkeypatch.setattr(launch, "MAX_SILENCE_S", 2.0)
    for _ in range(2):
        time.sleep(2.2)  # noqa: ASYNC251 - what a service does that was stopped, or starved
        await asyncio.sleep(0)
    await asyncio.sleep(0.6)
    assert await works(worker)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
async def test_who_is_blamed_for_a_signal(worker, number):
    os.kill(worker.pid, number)
    error = await end_of(worker)
    assert number.name in str(error)
    assert error.blames_step == (number is not signal.SIGKILL)


async def test_a_kill_for_memory_is_held_against_the_step(worker, monkeypatch):
    monkeypatch.setattr(MemoryKills, "have_grown", lambda kills: True)
    os.kill(worker.pid, signal.SIGKILL)
    error = await end_of(worker)
    assert "memory ran out" in str(error)
    assert error.blames_step


async def test_an_exception_is_held_against_the_step(worker):
    worker.submit(StepPlan(0, [5], [], [], [], []))  # row 5 does not exist
    error = await end_of(worker)
    assert "row 5" in str(error)
    assert error.blames_step
    assert await restarted(worker)


async def test_a_condemned_worker_ends_at_once(worker):
    pid = worker.pid
    worker.kill("a step took 31 s")
    worker.kill("and again")
    error = await end_of(worker)
    assert str(error) == "a step took 31 s"
    assert error.blames_step
    await worker.stop()
    worker.kill("nobody")
    assert not psutil.pid_exists(pid)


async def test_a_worker_that_cannot_be_killed_is_left_behind(worker, monkeypatch, caplog):
    """What hangs in a driver does not end, whatever it is sent."""
    popen = worker._link.process
    os.kill(worker.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "CLOSE_TIMEOUT_S", 0.1)
        patch.setattr(launch, "KILL_TIMEOUT_S", 0.1)
        patch.setattr(popen, "kill", lambda: None)
        worker.kill("a step took 31 s")
        assert str(await end_of(worker)) == "a step took 31 s"
        await worker.stop()
    assert "cannot be killed" in caplog.text
    popen.kill()
    popen.wait()
    await worker.start()
    assert await works(worker)


async def test_a_worker_with_other_facts_is_none(new_worker, monkeypatch):
    process = new_worker()
    monkeypatch.setattr(process, "_facts", FakeExecutor(num_blocks=9, vocab_size=7).facts)  # of the last one
    with pytest.raises(ExecutorError, match="num_blocks is 1024 and was 9; vocab_size is 256 and was 7; restart the"):
        await process.start()
    assert process._link is None

"""The worker as a process: it answers in order, its end is noticed at once, and it never outlives the service."""

import asyncio
import gc
import os
import signal
import subprocess
import sys

import psutil
import pytest
from waiting import wait_until

from penstock.models.executor import process as launch
from penstock.models.executor.group import new_executor
from penstock.models.executor.process import WorkerProcess
from penstock.models.executor.spawn import UNINTERRUPTED, WORKER, spawn
from penstock.models.executor.wire import FrameBuffer, encode_frame
from penstock.models.worker.main import MAX_PARTS_BYTES, TOKEN_BYTES
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.plan import AddedRow, Chunk, Decode, SamplingParams, StepPlan
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig

GREEDY = SamplingParams(temperature=0.0)


def first_plan(prompt, step=0, sampling=GREEDY):
    blocks = list(range(-(-(len(prompt) + 20) // 16)))
    added = AddedRow(0, 0, prompt, len(prompt), 0, blocks, sampling)
    return StepPlan(step, [], [added], [], [Chunk(0, 0, len(prompt))], [])


def decode(step):
    return StepPlan(step, [], [], [], [], [Decode(0, 1)])


async def started(process):
    """The worker has a process, which loads."""
    while process._link is None:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)


@pytest.fixture
async def worker(tiny_model, worker_config):
    process = WorkerProcess(worker_config(tiny_model("llama").path))
    await process.start()
    yield process
    await process.stop()


async def test_plans_are_answered_in_order(worker):
    results = worker.results()
    worker.submit(first_plan([1, 2, 3]))
    answers = []
    for step in range(1, 10):
        worker.submit(decode(step))
        answers.append(await anext(results))
    answers.append(await anext(results))
    assert [answer.step for answer in answers] == list(range(10))
    assert [answer.rows[0].num_computed for answer in answers] == list(range(3, 13))
    assert all(answer.computed_us > 0 and answer.waited_us >= 0 for answer in answers)

    # What is sent to all processes of a service is the service's business.
    os.kill(worker.pid, signal.SIGINT)
    os.kill(worker.pid, signal.SIGTERM)
    worker.submit(StepPlan(10, [0], [], [], [], []))
    nothing = await anext(results)
    assert (nothing.step, nothing.rows) == (10, [])
    worker.submit(first_plan([1, 2, 3], step=11))
    assert (await anext(results)).rows[0].token_ids == answers[0].rows[0].token_ids


async def test_a_plan_is_refused_before_the_workers_loss_is_reported(worker):
    worker._link._transport.abort()  # as the loop does it when it finds the socket closed; it calls us a turn later
    with pytest.raises(ExecutorError, match="has closed its socket"):
        worker.submit(first_plan([1, 2, 3]))
    with pytest.raises(ExecutorError):
        await anext(worker.results())


async def test_kill_is_noticed_at_once_after_the_last_whole_answer(worker):
    results = worker.results()
    worker.submit(first_plan([1, 2, 3]))
    answer = await anext(results)
    waiting = asyncio.ensure_future(anext(results))
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(ExecutorError, match="SIGKILL"):
        await waiting
    assert answer.step == 0
    with pytest.raises(ExecutorError, match="SIGKILL"):
        worker.submit(decode(1))
    await worker.stop()


async def test_an_answer_sent_before_the_end_is_delivered_before_the_error(worker):
    worker.submit(first_plan([1, 2, 3]))
    worker.submit(decode(1))
    worker.submit(StepPlan(2, [5], [], [], [], []))  # row 5 does not exist: the worker fails
    results = worker.results()
    assert [(await anext(results)).step, (await anext(results)).step] == [0, 1]
    with pytest.raises(ExecutorError, match=r"the worker failed: AssertionError: .*row 5"):
        await anext(results)


async def test_stop_ends_the_results_and_the_process(worker):
    pid = worker.pid
    ended = asyncio.ensure_future(anext(worker.results(), "ended"))
    await asyncio.sleep(0)
    await worker.stop()
    await worker.stop()
    assert await ended == "ended"
    assert not psutil.pid_exists(pid)
    with pytest.raises(ExecutorError, match="not running"):
        worker.submit(decode(0))


async def test_stop_ends_a_worker_that_does_not_react(worker, monkeypatch):
    monkeypatch.setattr(launch, "CLOSE_TIMEOUT_S", 0.2)
    process = psutil.Process(worker.pid)
    process.suspend()
    await worker.stop()
    assert not process.is_running()


@pytest.mark.parametrize("has_draft_model", [False, True])
async def test_a_restart_gives_the_same_facts(tiny_model, worker_config, has_draft_model):
    path = tiny_model("llama").path
    drafts = SpeculationConfig(DraftMethod.DRAFT_MODEL, 2, str(path)) if has_draft_model else None
    config = worker_config(
        path, kv_cache_bytes=None, memory_utilization=0.01, host_kv_cache_bytes=1 << 20, speculation=drafts
    )
    process = WorkerProcess(config)
    facts = await process.start()
    assert facts.num_host_blocks > 0
    assert facts.copy_us_per_block > 0
    try:
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ExecutorError):
            await anext(process.results())
        await process.stop()
        assert await process.start() == facts
        process.submit(first_plan([1, 2]))
        assert (await anext(process.results())).rows[0].token_ids
    finally:
        await process.stop()


async def test_slowness_is_logged_once_across_restarts(tiny_model, worker_config, capfd, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CPU_LIBRARY", "/none")
    process = WorkerProcess(worker_config(tiny_model("llama").path, backend="auto"))
    try:
        assert (await process.start()).backend == "reference"
        await process.stop()
        await process.start()
    finally:
        await process.stop()
    assert capfd.readouterr().err.count("SLOW") == 1


async def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path, worker_config):
    process = WorkerProcess(worker_config(tmp_path))
    with pytest.raises(ExecutorError, match=r"config\.json: is missing") as caught:
        await process.start()
    assert "\n" not in str(caught.value)
    await process.stop()


async def test_death_while_loading_is_noticed(tiny_model, worker_config):
    process = WorkerProcess(worker_config(tiny_model("llama").path))
    starting = asyncio.ensure_future(process.start())
    await started(process)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ExecutorError, match="SIGKILL while it loaded"):
        await starting


async def test_start_that_is_cancelled_leaves_no_process(tiny_model, worker_config):
    process = WorkerProcess(worker_config(tiny_model("llama").path))
    starting = asyncio.ensure_future(process.start())
    await started(process)
    pid = process.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not psutil.pid_exists(pid)


async def children_after_cancel(config, num_turns, num_turns_more=None):
    """Starts a worker and cancels that after so many turns of the loop, and perhaps again after some more; returns what
    is left of it."""
    others = set(psutil.Process().children())
    starting = asyncio.ensure_future(WorkerProcess(config).start())
    for turns in (num_turns, num_turns_more):
        for _ in range(turns or 0):
            await asyncio.sleep(0)
        if turns is not None:
            starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    return set(psutil.Process().children()) - others


async def test_no_cancellation_of_a_start_leaves_a_process(tmp_path, worker_config):
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    config = worker_config(tmp_path)
    for num_turns in (*range(8), 12):
        assert not await children_after_cancel(config, num_turns)
    for num_turns_more in range(4):
        assert not await children_after_cancel(config, 12, num_turns_more)
    await asyncio.sleep(0)
    gc.collect()
    assert complaints == []


async def test_stop_while_it_loads(tiny_model, worker_config):
    process = WorkerProcess(worker_config(tiny_model("llama").path))
    starting = asyncio.ensure_future(process.start())
    await started(process)
    await process.stop()
    with pytest.raises(ExecutorError, match="stopped while"):
        await starting


PARENT = """
import asyncio, sys
from penstock.models.executor.process import WorkerProcess
from penstock.scheduler.worker_config import WorkerConfig

async def main():
    worker = WorkerProcess(WorkerConfig(model=sys.argv[1], num_threads=1, kv_cache_bytes=1 << 24))
    if sys.argv[2] == "loaded":
        await worker.start()
    else:
        asyncio.ensure_future(worker.start())
        while worker._link is None:
            await asyncio.sleep(0)
    print(worker.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["loaded", "starting"])
def test_the_workers_parent_is_killed_and_so_is_the_worker(tiny_model, when):
    command = [sys.executable, "-P", "-c", PARENT, str(tiny_model("llama").path), when]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    # Its new parent may be slow to reap it, but it no longer runs.
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def test_the_service_process_needs_no_torch_to_launch():
    modules = "penstock.models.executor.process, penstock.models.checkpoint.checkpoint"
    code = f"import sys, {modules}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "triton", "multiprocessing"} & set(done.stdout.split())


async def test_under_uvloop_too(tiny_model, worker_config):
    config = worker_config(tiny_model("llama").path)
    code = """
import asyncio, sys, uvloop
from penstock.models.executor.process import WorkerProcess
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.plan import *
from penstock.scheduler.worker_config import WorkerConfig
import os, signal

async def main():
    worker = WorkerProcess(WorkerConfig(model=sys.argv[1], num_threads=1, kv_cache_bytes=1 << 24))
    await worker.start()
    worker.submit(StepPlan(0, [], [AddedRow(0, 0, [1, 2], 2, 0, [0], SamplingParams())], [], [Chunk(0, 0, 2)], []))
    results = worker.results()
    assert (await anext(results)).step == 0
    os.kill(worker.pid, signal.SIGKILL)
    try:
        await anext(results)
    except ExecutorError as error:
        print(error)
    await worker.stop()

uvloop.run(main())
"""
    command = [sys.executable, "-P", "-c", code, config.model]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert "SIGKILL" in done.stdout, done.stderr


async def test_prompt_logprobs_travel_in_frames_of_bounded_size(tiny_model, worker_config, monkeypatch):
    model = tiny_model("llama")
    prompt = [i % 150 for i in range(700)]
    sizes = []

    class Measured(FrameBuffer):
        def feed(self, data):
            for kind, body in super().feed(data):
                sizes.append(len(encode_frame(kind, body)))
                yield kind, body

    monkeypatch.setattr(launch, "FrameBuffer", Measured)
    process = WorkerProcess(worker_config(model.path))
    await process.start()
    try:
        process.submit(first_plan(prompt, sampling=SamplingParams(temperature=0.0, prompt_logprobs=20)))
        result = await anext(process.results())
    finally:
        await process.stop()
    parts = result.prompt_logprobs
    assert len(parts) > 1
    lengths = [len(part.logprobs.chosen) for part in parts]
    assert [part.start for part in parts] == [1 + sum(lengths[:i]) for i in range(len(parts))]
    assert sum(len(part.logprobs.chosen) for part in parts) == len(prompt) - 1
    assert all(len(part.logprobs.top) == 20 * len(part.logprobs.chosen) for part in parts)
    assert max(sizes) <= MAX_PARTS_BYTES + 1024
    assert sum(sizes) > MAX_PARTS_BYTES
    assert TOKEN_BYTES >= 9 + 5  # a float and an id in msgpack


# ------------------------------------------------------------------------------------------------------ started already


async def test_a_worker_that_was_started_already_is_the_first(tiny_model, worker_config):
    spawned = spawn()
    process = WorkerProcess(worker_config(tiny_model("llama").path), spawned=spawned)
    facts = await process.start()
    assert process.pid == spawned.process.pid
    await process.stop()
    assert await process.start() == facts
    assert process.pid != spawned.process.pid
    await process.stop()


def test_an_interrupt_during_a_workers_imports_prints_nothing():
    assert WORKER.startswith(UNINTERRUPTED)
    code = f"{UNINTERRUPTED}; import os; os.kill(os.getpid(), signal.SIGINT); print('alive')"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("alive\n", "")


def test_ranks_are_started_together_so_such_a_worker_ends(tiny_model, worker_config):
    spawned = spawn()
    new_executor(worker_config(tiny_model("llama").path, tensor_parallel_size=2), spawned)
    assert spawned.process.returncode == -signal.SIGKILL
    assert spawned.connection.fileno() == -1

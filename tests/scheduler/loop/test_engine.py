"""The step loop, over a fake executor: what happens when something arrives, ends, or breaks."""

import asyncio
import time

import pytest
from known_requests import ENGINE_VOCAB_SIZE
from waiting import until

from penstock.kv.manager import KVCacheManager
from penstock.scheduler.admission.latency_predictor import LatencyPredictor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.planning.planner import Planner
from penstock.scheduler.request import Change, EngineFinishReason, RefusalKind, Refused
from penstock.scheduler.testing.fake_executor import FakeExecutor


async def turns_until(condition):
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


async def test_whoever_comes_while_a_step_computes_is_in_the_next_one(submit, monkeypatch):
    executor = FakeExecutor(vocab_size=ENGINE_VOCAB_SIZE, seconds_per_step=0.3)
    plans, take = [], executor.submit

    def submit_and_note(plan):
        plans.append(plan)
        take(plan)

    monkeypatch.setattr(executor, "submit", submit_and_note)
    engine = Engine(executor)
    await engine.start()
    try:
        first = submit(engine, "first", max_tokens=50)
        assert engine._scheduler is not None
        async with asyncio.timeout(120):
            while engine._scheduler.predictor.oldest_step_s is None or len(first.token_ids[0]) < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            num_tokens = len(first.token_ids[0])
            while len(first.token_ids[0]) == num_tokens:  # noqa: ASYNC110
                await asyncio.sleep(0)
            for _ in range(5):
                await asyncio.sleep(0)  # plans are made meanwhile, as far as they are
            computed = executor.plans[0]
            submit(engine, "second", first=7, max_tokens=1)
            while not plans[-1].added:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert plans[-1].step == computed.step + 1
    finally:
        await engine.stop()


async def test_no_timer_is_set_for_waits_below_its_resolution(engine, submit, monkeypatch):
    """It would ring at once, again and again."""
    monkeypatch.setattr(LatencyPredictor, "spare_s", property(lambda predictor: 0.0004))
    received = submit(engine, "only", max_tokens=3)
    await turns_until(lambda: received.finished is not None)
    assert engine._pump_timer is None


async def test_requests_run_and_finish(engine, submit):
    requests = [submit(engine, str(number), first=number, max_tokens=number + 1) for number in range(20)]
    assert all(received.accepted is not None for received in requests)
    assert engine.stats().requests == 20
    await engine.wait_idle()
    for received in requests:
        received.check_end()
    stats = engine.stats()
    assert (stats.requests, stats.running, stats.waiting, stats.kv_usage, stats.finished) == (0, 0, 0, 0.0, 20)


async def test_16_identical_prompts_of_1000_tokens_compute_the_prefix_once(engine, submit):
    requests = [submit(engine, str(number), 1000, sampling=SamplingParams(seed=number)) for number in range(16)]
    await engine.wait_idle()
    for received in requests:
        received.check_end()
    assert engine.stats().prefill_tokens == 1000 + 15 * (1000 % 16)
    assert engine.stats().cached_tokens == 15 * 992


async def test_two_plans_are_in_flight(engine, executor, submit):
    depths = []
    submit_plan = executor.submit

    def submit_and_count(plan):
        submit_plan(plan)
        depths.append(len(executor.plans))

    executor.submit = submit_and_count
    submit(engine, "one", max_tokens=30)
    await engine.wait_idle()
    assert depths[0] == 1
    assert set(depths[1:-1]) == {2}


async def test_writers_have_a_turn_between_steps(engine, submit):
    submit(engine, "one", max_tokens=50)
    turns = 0
    while engine.stats().requests:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 50


async def test_abort_ends_a_request_once(engine, submit):
    other = submit(engine, "other", max_tokens=10)
    received = submit(engine, "one", first=5, max_tokens=500, n=3)
    await turns_until(lambda: received.token_ids)
    assert engine.abort("one", EngineFinishReason.CANCELLED, "enough")
    assert received.finished.reason is EngineFinishReason.CANCELLED
    assert received.finished.message == "enough"
    assert received.finished.usage.output_tokens > 0
    assert not engine.abort("one", EngineFinishReason.CANCELLED)
    assert not engine.abort("never seen", EngineFinishReason.CANCELLED)
    await engine.wait_idle()
    other.check_end()
    received.check_end()


async def test_deadlines_end_running_and_waiting_requests(submit):
    engine = Engine(FakeExecutor(vocab_size=ENGINE_VOCAB_SIZE, seconds_per_step=0.002), SchedulerConfig(max_num_seqs=1))
    await engine.start()
    deadline = time.monotonic() + 0.3
    running = submit(engine, "running", max_tokens=3000, deadline=time.monotonic() + 3600)
    waiting = submit(engine, "waiting", max_tokens=3000, deadline=deadline)
    in_time = submit(engine, "in time", max_tokens=1, deadline=time.monotonic() + 3600)
    await until(lambda: running.token_ids and waiting.finished)
    engine.update("running", Change(deadline=time.monotonic() + 0.01))
    await engine.wait_idle()
    assert time.monotonic() > deadline - 0.01
    assert running.finished.reason is waiting.finished.reason is EngineFinishReason.DEADLINE
    assert running.finished.usage.output_tokens > 0
    assert waiting.finished.usage.output_tokens == 0
    in_time.check_end()
    assert in_time.finished.reason is EngineFinishReason.LENGTH
    assert not engine._deadlines
    with pytest.raises(Refused) as refused:
        submit(engine, "too late", deadline=time.monotonic() - 1)
    assert refused.value.kind is RefusalKind.DEADLINE
    await engine.stop()


async def test_answers_before_the_death_count(engine, executor, submit):
    """A plan that cannot be submitted any more must not hide the answers that are there."""
    received = submit(engine, "one", max_tokens=3)
    submit_plan = executor.submit
    known = []

    def submit_and_die(plan):
        if plan.step == 2:
            executor.submit = submit_plan
            executor.die()
            raise ExecutorError("gone")
        submit_plan(plan)

    executor.submit = submit_and_die
    engine.watch(lambda state: known.append(len(received.token_ids.get(0, []))))
    await engine.wait_idle()
    received.check_end()
    assert received.finished.reason is EngineFinishReason.LENGTH
    assert known == [1, 1]


async def test_a_bug_ends_every_request_with_internal(engine, submit, monkeypatch, caplog):
    monkeypatch.setattr(KVCacheManager, "publish", lambda *args: 1 / 0)
    requests = [submit(engine, str(number), first=number) for number in range(3)]
    await asyncio.wait_for(engine.wait_idle(), 120)
    assert {r.finished.reason for r in requests} == {EngineFinishReason.INTERNAL}
    assert engine.state is EngineState.FAILED
    assert "ZeroDivisionError" in caplog.text


async def test_a_sink_that_raises_does_not_keep_others_from_their_end(engine, executor, submit, caplog):
    first, second = submit(engine, "first", max_tokens=1000), submit(engine, "second", first=3, max_tokens=1000)

    def broken(_event):
        raise RuntimeError("no stream")

    first.request.sink = broken
    await asyncio.wait_for(engine.wait_idle(), 120)
    assert second.finished.reason is EngineFinishReason.INTERNAL


async def test_a_sink_may_end_its_request_as_soon_as_it_is_accepted(engine, new_request):
    ends = []

    def sink(event):
        ends.append(event)
        engine.abort("one", EngineFinishReason.CANCELLED)

    request = new_request("one", [1, 2, 3], block_size=16, deadline=time.monotonic() + 3600)
    request.sink = sink
    engine.submit(request)
    await asyncio.wait_for(engine.wait_idle(), 120)
    assert [getattr(event, "reason", None) for event in ends] == [None, EngineFinishReason.CANCELLED]
    assert not engine._deadlines


async def test_a_refused_request_leaves_nothing_behind(submit):
    engine = Engine(FakeExecutor(num_blocks=10, vocab_size=ENGINE_VOCAB_SIZE))
    await engine.start()
    with pytest.raises(Refused):
        submit(engine, "one", 1000, deadline=time.monotonic() + 3600)
    await asyncio.wait_for(engine.wait_idle(), 120)
    assert not engine._deadlines
    await engine.stop()


async def test_an_internal_error_at_a_requests_end_is_reported_to_all(engine, submit, monkeypatch):
    first, second = submit(engine, "first", max_tokens=1000), submit(engine, "second", max_tokens=1000)

    def retire(planner, choice):
        raise RuntimeError("planted")

    monkeypatch.setattr(Planner, "retire", retire)
    with pytest.raises(RuntimeError, match="planted"):
        engine.abort("first", EngineFinishReason.CANCELLED)
    assert engine.state is EngineState.FAILED
    assert first.finished.reason is second.finished.reason is EngineFinishReason.INTERNAL


async def test_stopping_twice_at_the_same_time_waits_for_the_executor_both_times(executor):
    engine = Engine(executor)
    await engine.start()
    stopping = asyncio.Event()
    stop = executor.stop

    async def slow_stop():
        await stopping.wait()
        await stop()

    executor.stop = slow_stop
    stops = [asyncio.create_task(engine.stop()) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in stops)
    stopping.set()
    await asyncio.gather(*stops)


async def test_draining_refuses_what_is_new_and_finishes_the_rest(engine, submit):
    states: list[EngineState] = []
    engine.watch(states.append)
    received = submit(engine, "one", max_tokens=30)
    engine.drain()
    with pytest.raises(Refused) as refused:
        submit(engine, "two")
    assert refused.value.kind is RefusalKind.DRAINING
    await engine.wait_idle()
    received.check_end()
    assert received.finished.reason is EngineFinishReason.LENGTH
    await engine.stop()
    assert states == [EngineState.DRAINING, EngineState.STOPPED]


async def test_stop_ends_what_is_alive(engine, submit):
    received = submit(engine, "one", max_tokens=1000)
    await asyncio.sleep(0)
    await engine.stop()
    await engine.stop()
    assert received.finished.reason is EngineFinishReason.SHUTDOWN
    with pytest.raises(Refused):
        submit(engine, "two")


async def test_an_engine_that_drains_before_it_has_started_takes_nothing(executor, submit):
    engine = Engine(executor)
    with pytest.raises(Refused) as refused:
        submit(engine, "early")
    assert refused.value.kind is RefusalKind.WORKER_DOWN
    engine.drain()
    await engine.start()
    with pytest.raises(Refused) as refused:
        submit(engine, "late")
    assert refused.value.kind is RefusalKind.DRAINING
    await engine.wait_idle()
    await engine.stop()


async def test_a_failed_executor_start_is_reported():
    class Broken(FakeExecutor):
        async def start(self):
            raise ExecutorError("no such model; name another")

    engine = Engine(Broken())
    states: list[EngineState] = []
    engine.watch(states.append)
    with pytest.raises(ExecutorError, match="name another"):
        await engine.start()
    assert states == [EngineState.FAILED]
    await engine.stop()

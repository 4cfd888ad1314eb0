"""The worker dies, hangs or does not come back, over a fake executor: what was admitted goes on as if nothing had
happened, and what cannot go on is told."""

import asyncio
import random
import time

import pytest
from known_requests import ENGINE_VOCAB_SIZE

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.recovery.restarts import LONG_LIFE_S, RestartBudget, WorkerFailure
from penstock.scheduler.recovery.watchdog import StepWatchdog
from penstock.scheduler.request import Change, EngineFinishReason, RefusalKind, Refused
from penstock.scheduler.testing.fake_executor import FakeExecutor

POISON = 77
"""A prompt with this token twice in a row kills."""


@pytest.fixture
async def new_engine():
    engines = []

    async def new_engine(executor, config=None, **options):
        engine = Engine(executor, config, restart_delay_s=0.001, **options)
        engines.append(engine)
        await engine.start()
        return engine

    yield new_engine
    for engine in engines:
        await engine.stop()


@pytest.fixture
async def engine(new_engine, executor):
    return await new_engine(executor)


async def until(condition):
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - what is waited for happens between two turns of the loop
            await asyncio.sleep(0)


def random_fields(rng):
    """Every feature whose state a crash could spoil."""
    sampling = SamplingParams(
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.randrange(100),
        logprobs=rng.choice((None, 0, 2)),
        prompt_logprobs=rng.choice((None, None, 1)),
        min_tokens=rng.choice((0, 5)),
        stop_token_ids=rng.choice(((), (3, 50))),
    )
    return {"sampling": sampling, "n": rng.choice((1, 1, 2, 3)), "max_tokens": rng.randint(1, 60)}


@pytest.mark.parametrize("blames_step", [False, True])
@pytest.mark.parametrize("seed", range(3))
async def test_no_token_is_lost_repeated_or_changed(new_engine, submit, seed, blames_step):
    rng = random.Random(seed)
    executor = FakeExecutor(num_blocks=60, vocab_size=ENGINE_VOCAB_SIZE)
    engine = await new_engine(executor, SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=32))
    requests = [
        submit(engine, str(number), rng.randint(1, 120), rng.choice((0, 50)), **random_fields(rng))
        for number in range(40)
    ]
    for _ in range(20):
        steps = engine.stats().steps + rng.randint(1, 12)
        await until(lambda steps=steps: engine.stats().steps >= steps or not engine.stats().requests)
        executor.die("killed", blames_step)
        await until(lambda: engine.state is not EngineState.SERVING)
        await until(lambda: engine.state is EngineState.SERVING)
    await engine.wait_idle()
    for received in requests:
        received.check_end()
    # Blamed again and again without a culprit, the steps convict somebody in the end.
    num_whole = sum(r.finished.reason in (EngineFinishReason.LENGTH, EngineFinishReason.STOP) for r in requests)
    assert num_whole >= (len(requests) - 5 if blames_step else len(requests))
    stats = engine.stats()
    assert (stats.restarts, stats.kv_usage, stats.running, stats.waiting) == (20, 0.0, 0, 0)
    assert max(received.finished.timings.restarts for received in requests) > 1


def poisoned(row):
    """Kills when its first output is computed."""
    return len(row.history) > row.num_prompt_tokens and row.history[:2] == [POISON, POISON]


@pytest.mark.parametrize("place", [0, 40, 63])
async def test_reliability_figure_14_only_the_killer_among_64_is_refused(new_engine, submit, place, caplog):
    engine = await new_engine(FakeExecutor(num_blocks=1000, vocab_size=ENGINE_VOCAB_SIZE, kills=poisoned))
    requests = [
        submit(engine, str(number), first=number, max_tokens=30, prompt=[POISON] * 20 if number == place else None)
        for number in range(64)
    ]
    await engine.wait_idle()
    killer = requests.pop(place)
    assert killer.finished.reason is EngineFinishReason.KILLED_WORKER
    for received in requests:
        received.check_end()
        assert received.finished.reason is EngineFinishReason.LENGTH
    assert engine.stats().restarts <= 9
    assert f"request {place} crashed the worker twice" in caplog.text


async def test_killers_in_every_place_and_with_every_feature(new_engine, submit):
    def kills(row):
        return row.history[0] == POISON and len(row.history) >= row.num_prompt_tokens + row.history[1]

    rng = random.Random(1)
    executor = FakeExecutor(num_blocks=60, vocab_size=ENGINE_VOCAB_SIZE, kills=kills)
    engine = await new_engine(executor, SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=16))
    requests = {}
    for number in range(40):
        fields = random_fields(rng)
        prompt = None
        if number % 10 == 3:
            prompt = [POISON, rng.randrange(8), 5]
            fields |= {"max_tokens": 20, "sampling": SamplingParams(seed=number)}
        requests[number] = submit(engine, str(number), rng.randint(1, 60), prompt=prompt, **fields)
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
        await until(lambda: engine.state is EngineState.SERVING)
    await engine.wait_idle()
    for number, received in requests.items():
        received.check_end()
        refused = received.finished.reason is EngineFinishReason.KILLED_WORKER
        assert refused == (number % 10 == 3), (number, received.finished)
    assert engine.stats().kv_usage == 0.0


async def test_a_crash_of_an_idle_worker_is_nobodys_fault(engine, executor, submit):
    for name in ("one", "two"):
        received = submit(engine, name, max_tokens=5)
        await engine.wait_idle()
        assert received.finished.reason is EngineFinishReason.LENGTH
        executor.die("an idle worker", blames_step=True)
        await until(lambda: engine.state is EngineState.RECOVERING)
        await until(lambda: engine.state is EngineState.SERVING)
    assert not engine._scheduler._bisector


async def test_an_executor_that_stops_by_itself_is_started_again(engine, executor, submit):
    received = submit(engine, "one", max_tokens=100)
    await until(lambda: received.token_ids)
    await executor.stop()
    await engine.wait_idle()
    received.check_end()
    assert received.finished.reason is EngineFinishReason.LENGTH


async def in_recovery(engine, executor):
    """The worker has died, and the next one does not come yet."""
    executor.may_start.clear()
    executor.die()
    await until(lambda: engine.state is EngineState.RECOVERING and executor.num_starts == 2)


async def test_everything_but_new_requests_works_while_the_worker_is_replaced(engine, executor, submit):
    names = ("goes on", "cancelled", "expires", "held", "shorter")
    requests = {name: submit(engine, name, first=3, max_tokens=200) for name in names}
    await until(lambda: all(received.token_ids for received in requests.values()))
    await in_recovery(engine, executor)
    with pytest.raises(Refused) as refused:
        submit(engine, "new")
    assert refused.value.kind is RefusalKind.WORKER_DOWN
    assert refused.value.retry_after_ms == 1000
    assert engine.abort("cancelled", EngineFinishReason.CANCELLED)
    assert engine.update("expires", Change(deadline=time.monotonic() + 0.01))
    assert engine.update("shorter", Change(max_tokens=100))
    engine.hold("held", True)
    await until(lambda: requests["expires"].finished is not None)
    stats = engine.stats()
    assert (stats.requests, stats.running, stats.stalled, stats.refused, stats.kv_usage) == (3, 0, 1, 1, 0.0)
    engine.reconfigure(SchedulerConfig(max_num_seqs=2))
    executor.may_start.set()
    await until(lambda: engine.stats().requests == 1)
    engine.hold("held", False)
    await engine.wait_idle()
    reasons = {name: received.finished.reason for name, received in requests.items()}
    assert reasons.pop("cancelled") is EngineFinishReason.CANCELLED
    assert reasons.pop("expires") is EngineFinishReason.DEADLINE
    assert set(reasons.values()) == {EngineFinishReason.LENGTH}
    assert len(requests["shorter"].token_ids[0]) == 100
    requests["goes on"].check_end()
    requests["held"].check_end()
    submit(engine, "new")


async def test_state_changes_are_reported_as_they_occur(engine, executor, submit):
    states: list[EngineState] = []
    engine.watch(states.append)
    received = submit(engine, "one", max_tokens=50)
    await in_recovery(engine, executor)
    assert states == [EngineState.RECOVERING]
    executor.may_start.set()
    await engine.wait_idle()
    assert states == [EngineState.RECOVERING, EngineState.SERVING]
    received.check_end()


async def test_a_drain_amid_recovery_finishes_what_was_accepted(engine, executor, submit):
    states: list[EngineState] = []
    engine.watch(states.append)
    received = submit(engine, "one", max_tokens=50)
    await in_recovery(engine, executor)
    engine.drain()
    assert engine.state is EngineState.RECOVERING
    with pytest.raises(Refused) as refused:
        submit(engine, "new")
    assert refused.value.kind is RefusalKind.DRAINING
    executor.may_start.set()
    await engine.wait_idle()
    received.check_end()
    assert received.finished.reason is EngineFinishReason.LENGTH
    assert states == [EngineState.RECOVERING, EngineState.DRAINING]


async def test_a_worker_that_dies_amid_a_drain_is_replaced(engine, executor, submit):
    received = submit(engine, "one", max_tokens=50)
    await until(lambda: received.token_ids)
    engine.drain()
    await in_recovery(engine, executor)
    assert engine.resume()
    assert not engine.resume()
    executor.may_start.set()
    await until(lambda: engine.state is EngineState.SERVING)
    await engine.wait_idle()
    received.check_end()
    assert received.finished.reason is EngineFinishReason.LENGTH


async def test_workers_that_do_not_start_are_tried_again(engine, executor, submit, caplog):
    received = submit(engine, "one", max_tokens=50)
    executor.fails_to_start.extend([ExecutorError("no memory", blames_step=True)] * 4)
    executor.die()
    await engine.wait_idle()
    received.check_end()
    assert received.finished.reason is EngineFinishReason.LENGTH
    assert caplog.text.count("another worker did not start: no memory") == 4
    assert "another worker runs after" in caplog.text


async def test_five_failed_restarts_end_all_requests_with_the_cause(engine, executor, submit):
    states: list[tuple[EngineState, int]] = []
    requests = [submit(engine, str(number), first=number, max_tokens=100) for number in range(300)]
    engine.watch(lambda state: states.append((state, sum(r.finished is not None for r in requests))))
    await until(lambda: requests[0].token_ids)
    executor.fails_to_start.extend([ExecutorError("no memory", blames_step=True)] * 5)
    executor.die("killed by signal 9")
    await engine.wait_idle()
    assert states == [(EngineState.RECOVERING, 0), (EngineState.FAILED, 0)]
    assert {r.finished.reason for r in requests} == {EngineFinishReason.WORKER_DIED}
    assert {r.finished.message for r in requests} == {"no memory"}
    for received in requests:
        received.check_end()
    with pytest.raises(Refused) as refused:
        submit(engine, "later")
    assert refused.value.kind is RefusalKind.WORKER_DOWN
    assert refused.value.retry_after_ms is None
    assert not engine.abort("0", EngineFinishReason.CANCELLED)
    assert not engine.resume()


@pytest.mark.parametrize("when", ["it starts", "before it starts"])
async def test_stop_amid_recovery_leaves_nothing(new_engine, executor, submit, when):
    engine = await new_engine(executor)
    received = submit(engine, "one", max_tokens=50)
    if when == "it starts":
        await in_recovery(engine, executor)
    else:
        executor.fails_to_start.extend([ExecutorError("not yet")] * 30)
        executor.die()
        await until(lambda: executor.num_starts > 2)
    num_starts = executor.num_starts
    await asyncio.wait_for(engine.stop(), 120)
    assert received.finished.reason is EngineFinishReason.SHUTDOWN
    assert engine.state is EngineState.STOPPED
    await asyncio.sleep(0.01)
    assert executor.num_starts == num_starts
    assert executor._stopped


class HangingExecutor(FakeExecutor):
    """A step in which a prompt with poison begins does not end."""

    async def _wait_for_plan(self):
        await super()._wait_for_plan()
        while self.plans and any(POISON in added.token_ids for added in self.plans[0].added):
            if self._death is not None or self._stopped:
                return
            await asyncio.sleep(0.001)


async def test_a_step_that_does_not_end_is_fatal_and_found_out(new_engine, submit, caplog):
    engine = await new_engine(HangingExecutor(vocab_size=ENGINE_VOCAB_SIZE), step_limit_s=0.05)
    others = [submit(engine, str(number), first=number, max_tokens=40) for number in range(4)]
    await until(lambda: engine.stats().steps > 8)  # so that the model of steps says something
    killer = submit(engine, "hangs", prompt=[POISON] * 5, max_tokens=5)
    others.append(submit(engine, "late", first=30, max_tokens=40))
    await engine.wait_idle()
    assert killer.finished.reason is EngineFinishReason.KILLED_WORKER
    for received in others:
        received.check_end()
        assert received.finished.reason is EngineFinishReason.LENGTH
    assert "a step took more than 0.05 s" in caplog.text


async def expired_after(watchdog_ticks, predicted_s):
    expired: list[float] = []
    watchdog = StepWatchdog(0.032, lambda: predicted_s, expired.append)
    watchdog.submitted()
    watchdog.start()
    for _ in range(watchdog_ticks):
        watchdog.stop()
        watchdog._tick()
    watchdog.stop()
    return expired


async def test_the_limit_of_a_step_follows_its_prediction():
    assert await expired_after(32, 0.001) == []
    assert await expired_after(33, 0.001) == [0.032]
    assert await expired_after(33, 0.01) == []
    assert await expired_after(101, 0.01) == [0.1]
    assert await expired_after(33, None) == []
    assert await expired_after(641, None) == [0.64]


async def test_time_in_which_the_loop_stood_still_is_not_the_steps():
    expired: list[float] = []
    watchdog = StepWatchdog(0.05, lambda: 0.0, expired.append)
    watchdog.submitted()
    watchdog.start()
    time.sleep(0.2)  # noqa: ASYNC251 - as if the process had been stopped
    await asyncio.sleep(0.005)
    assert expired == []
    await asyncio.wait_for(_wait_for(expired), 120)
    watchdog.answered()
    watchdog.stop()


async def _wait_for(items):
    while not items:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.001)


def test_when_to_give_up():
    now = 0.0
    restarts = RestartBudget(1.0, clock=lambda: now)
    restarts.answered()
    restarts.died(WorkerFailure.KILLED)
    assert restarts.delay_s == 0
    delays = []
    while not restarts.is_hopeless:
        restarts.failed(WorkerFailure.BY_ITSELF)
        delays.append(restarts.delay_s)
    assert delays == [1, 2, 4, 8, 16]
    restarts.succeeded()
    now = LONG_LIFE_S + 1
    restarts.died(WorkerFailure.BY_ITSELF)
    assert not restarts.is_hopeless
    assert restarts.delay_s == 0


@pytest.mark.parametrize("failure", WorkerFailure)
def test_a_worker_that_dies_before_its_first_step_again_and_again_is_given_up(failure):
    restarts = RestartBudget()
    restarts.answered()
    count = 0
    while not restarts.is_hopeless:
        restarts.died(failure)
        restarts.succeeded()
        count += 1
    assert count == failure.value + 1  # the first one was good
    assert restarts.total == count

"""How late the event loop is: the arithmetic on a clock of the test's own, and real loops that are held up."""

import asyncio
import time

import pytest
import uvloop

import penstock.v1 as pb
from penstock.clients.cli.as_dict import duration_of
from penstock.service.telemetry.event_loop_lag import MAX_SAMPLES, PERIOD_S, Lag, LoopLag


class FakeTimer:
    def __init__(self, due, callback):
        self.due = due
        self.callback = callback
        self.is_cancelled = False

    def cancel(self):
        self.is_cancelled = True


class FakeLoop:
    """A clock, and timers that run as late as they are told to."""

    def __init__(self):
        self.now = 1000.0
        self.timers = []

    def clock(self):
        return self.now

    def call_later(self, delay, callback, *arguments):
        self.timers.append(FakeTimer(self.now + delay, lambda: callback(*arguments)))
        return self.timers[-1]

    def run_next(self, late_s=0.0):
        timer = self.timers.pop(0)
        self.now = timer.due + late_s
        timer.callback()


@pytest.fixture
def loop():
    return FakeLoop()


@pytest.fixture
def lag(loop):
    sampler = LoopLag(loop.clock)
    sampler.start(loop)
    return sampler


def milliseconds(lag):
    return tuple(round(seconds * 1000, 6) for seconds in (lag.p50_s, lag.p99_s, lag.max_s))


def test_nothing_is_known_before_the_first_sample(loop, lag):
    assert (lag.num_samples, lag.over(100)) == (0, None)
    loop.run_next()
    assert lag.over(100) == Lag(0.0, 0.0, 0.0)
    assert lag.over(0) is None
    assert lag.over(-5) is None


def test_samples_are_a_period_apart_from_when_the_last_one_ran(loop, lag):
    for late_s in (0.0, 0.004, 0.0):
        loop.run_next(late_s)
    assert loop.now == pytest.approx(1000 + 3 * PERIOD_S + 0.004)
    assert lag.num_samples == 3
    assert len(loop.timers) == 1


def test_quantiles_are_of_the_nearest_rank(loop, lag):
    for late_ms in (7, 3, 1, 5):
        loop.run_next(late_ms / 1000)
    assert milliseconds(lag.over(4)) == (3, 7, 7)
    assert milliseconds(lag.over(2)) == (1, 5, 5)
    for i in range(200):
        loop.run_next((i * 77 % 200) / 20_000)  # 0 to 9.95 ms, in no order
    assert milliseconds(lag.over(200)) == (4.95, 9.85, 9.95)


def test_lag_covers_only_the_latest_samples_requested(loop, lag):
    loop.run_next(0.015)
    loop.run_next(0.001)
    assert milliseconds(lag.over(1)) == (1, 1, 1)
    assert milliseconds(lag.over(2)) == (1, 15, 15)


def test_a_long_wait_counts_by_its_length(loop, lag):
    loop.run_next(0.05)
    assert lag.num_samples == 3
    assert milliseconds(lag.over(3)) == (30, 50, 50)
    assert milliseconds(lag.over(1)) == (10, 10, 10)


def test_a_timer_that_runs_too_early_is_not_late(loop, lag):
    loop.run_next(-0.001)
    assert lag.over(1) == Lag(0.0, 0.0, 0.0)


def test_memory_is_bounded_and_the_longest_wait_is_kept(loop, lag):
    loop.run_next(0.015)
    for _ in range(MAX_SAMPLES):
        loop.run_next()
    assert lag.num_samples == MAX_SAMPLES + 1
    assert milliseconds(lag.over(10 * MAX_SAMPLES)) == (0, 0, 0)
    loop.run_next(10_000 * MAX_SAMPLES * PERIOD_S)
    assert lag.num_samples == 2 * MAX_SAMPLES + 1
    assert len(lag._samples) == MAX_SAMPLES
    assert lag.over(MAX_SAMPLES).max_s == pytest.approx(10_000 * MAX_SAMPLES * PERIOD_S)


def test_after_its_end_no_timer_is_left(loop, lag):
    loop.run_next()
    lag.stop()
    lag.stop()
    assert [timer.is_cancelled for timer in loop.timers] == [True]
    LoopLag().stop()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_loop_that_is_held_up(new_loop):
    async def hold_up():
        lag = LoopLag()
        lag.start(asyncio.get_running_loop())
        async with asyncio.timeout(120):
            while not lag.num_samples:  # noqa: ASYNC110 - nothing tells of a sample
                await asyncio.sleep(0.001)
            before = lag.num_samples
            time.sleep(PERIOD_S + 0.1)  # noqa: ASYNC251 - the timer becomes due at the latest after a period
            while lag.num_samples == before:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return lag.over(lag.num_samples - before)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        late = runner.run(hold_up())  # ends, though nobody stopped the sampler
    assert late.max_s >= 0.1


async def read(answers):
    async with asyncio.timeout(120):
        return (await answers.read()).loop_lag


async def test_watch_stats_reports_each_interval(start_service):
    service = await start_service(admin_listen="127.0.0.1:0")
    answers = service.admin.WatchStats(pb.WatchStatsRequest(interval=duration_of(1)))
    await read(answers)
    time.sleep(PERIOD_S + 0.1)  # noqa: ASYNC251
    held_up = await read(answers)
    percentiles = [each.ToMicroseconds() for each in (held_up.p50, held_up.p99, held_up.max)]
    assert percentiles == sorted(percentiles)
    assert percentiles[-1] >= 100_000


async def test_the_first_answer_has_the_interval_before_it(start_service):
    service = await start_service(admin_listen="127.0.0.1:0")
    sampler = service.server._loop_lag
    before = sampler.num_samples
    time.sleep(PERIOD_S + 0.1)  # noqa: ASYNC251
    async with asyncio.timeout(120):
        while sampler.num_samples == before:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    answers = service.admin.WatchStats(pb.WatchStatsRequest(interval=duration_of(3600)))
    assert (await read(answers)).max.ToMicroseconds() >= 100_000


async def test_an_interval_is_reported_once(start_service):
    service = await start_service(admin_listen="127.0.0.1:0")
    sampler = service.server._loop_lag
    sampler.stop()
    sampler._samples.extend([0.5] * 4)
    sampler.num_samples += 4
    answers = service.admin.WatchStats(pb.WatchStatsRequest(interval=duration_of(0.1)))
    async with asyncio.timeout(120):
        assert (await answers.read()).loop_lag.max.ToMilliseconds() == 500
        assert not (await answers.read()).HasField("loop_lag")
        sampler._samples.extend([0.25, 0.125])
        sampler.num_samples += 2
        third = (await answers.read()).loop_lag
    assert [each.ToMilliseconds() for each in (third.p50, third.p99, third.max)] == [125, 250, 250]


async def test_a_service_that_has_stopped_samples_no_more(start_service):
    service = await start_service(admin_listen="127.0.0.1:0")
    await service.server.stop()
    sampled = service.server._loop_lag.num_samples
    await asyncio.sleep(5 * PERIOD_S)
    assert service.server._loop_lag.num_samples == sampled

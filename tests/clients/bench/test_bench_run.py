"""How a load is sent: places of a closed loop, times of an open one, turns, bounds, failures, and an early end."""

import asyncio
import time

import pytest

from penstock.clients.bench import runner as bench_run
from penstock.clients.bench.lengths import Uniform
from penstock.clients.bench.runner import BenchProgress, run
from penstock.clients.bench.target import INTERRUPTED, NOT_SENT, OK
from penstock.clients.bench.trace import TraceReader
from penstock.clients.bench.workload import ClosedLoop, OpenLoop, RandomLoad


class Scripted:
    """A caller that answers after a while, or as it is told to by number."""

    def __init__(self, seconds=0.0, **outcomes):
        self.seconds = seconds
        self.failing = outcomes.get("failing", ())
        self.raising = outcomes.get("raising")
        self.now = self.most = 0
        self.asked = []

    async def call(self, request, past, record):
        self.now += 1
        self.most = max(self.most, self.now)
        self.asked.append((request.number, [one.request.number for one in past]))
        try:
            await asyncio.sleep(self.seconds)
            if request.number == self.raising:
                raise ValueError("the caller's own")
            if request.number in self.failing:
                record.retry_after_s = 0.001
                record.fail(time.perf_counter(), "UNAVAILABLE", "as told")
            else:
                record.tokens(time.perf_counter(), [1], 1)
                record.status, record.ended_s = OK, time.perf_counter()
        finally:
            self.now -= 1


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(bench_run, "_PAUSE_AFTER_FAILURE_S", 0.0)


def load(arrivals, num_requests=20, **known):
    return RandomLoad(vocab_size=50, arrivals=arrivals, num_requests=num_requests, prompt_tokens=Uniform(3, 3), **known)


def statuses(report):
    return [record.status for record in report.records]


async def test_a_closed_loop_keeps_a_fixed_number_of_requests_in_flight():
    caller = Scripted(0.002)
    report = await run(load(ClosedLoop(4), 30), caller)
    assert caller.most == 4
    assert statuses(report) == [OK] * 30
    assert [record.request.number for record in report.records] == list(range(30))
    assert report.began_s <= report.records[0].sent_s <= report.records[-1].ended_s == report.ended_s
    assert not report.was_stopped


async def test_an_open_loop_sends_at_its_times_whatever_is_on_its_way():
    caller = Scripted(0.3)
    asked = load(OpenLoop(200), 40)
    report = await run(asked, caller)
    assert caller.most > 20
    for record, (request,) in zip(report.records, asked.conversations(), strict=True):
        assert record.request == request
        assert record.sent_s - report.began_s >= request.arrival_s
        assert record.late_s == pytest.approx(record.sent_s - report.began_s - request.arrival_s, abs=1e-6)


async def test_excess_concurrent_requests_are_reported_and_not_sent():
    report = await run(load(OpenLoop(10_000), 50), Scripted(0.2), max_outstanding=10)
    assert statuses(report).count(NOT_SENT) == 40
    assert report.failures == {NOT_SENT: 40}
    assert {record.error for record in report.records if not record.is_ok} == {"10 were in flight already"}


async def test_turns_follow_each_other():
    caller = Scripted()
    await run(load(ClosedLoop(1), 6, turns=3), caller)
    assert caller.asked == [(0, []), (1, [0]), (2, [0, 1]), (3, []), (4, [3]), (5, [3, 4])]


async def test_after_a_failed_turn_the_rest_is_not_sent():
    caller = Scripted(failing={1})
    report = await run(load(ClosedLoop(1), 6, turns=3), caller)
    assert statuses(report) == [OK, "UNAVAILABLE", NOT_SENT, OK, OK, OK]
    assert report.summary()["requests"]["sent"] == 5


async def test_a_turn_of_a_trace_waits_for_its_time_and_for_the_turn_before(tmp_path):
    (tmp_path / "t").write_text(
        '{"arrival_s": 0, "prompt_tokens": 1, "max_tokens": 1, "conversation": 1}\n'
        '{"arrival_s": 0.001, "prompt_tokens": 1, "max_tokens": 1, "conversation": 1}\n'
        '{"arrival_s": 0.2, "prompt_tokens": 1, "max_tokens": 1, "conversation": 1}\n'
    )
    report = await run(TraceReader(vocab_size=9).read(tmp_path / "t"), Scripted(0.03))
    first, second, third = report.records
    assert second.sent_s >= first.ended_s
    assert second.late_s <= second.sent_s - first.ended_s  # the wait for the turn before is no lateness
    assert third.sent_s >= report.began_s + 0.2


async def test_nothing_is_sent_after_the_duration_and_what_runs_is_waited_for():
    caller = Scripted(0.05)
    report = await run(load(ClosedLoop(2), None), caller, duration_s=0.12)
    assert set(statuses(report)) == {OK}
    assert 2 <= len(report.records) <= 6  # each place has sent its third after 0.1 s at the earliest
    report = await run(load(ClosedLoop(1), None, turns=100), caller, duration_s=0.12)
    assert statuses(report) == [OK] * len(report.records)
    assert len(report.records) <= 3
    report = await run(load(OpenLoop(100), None), caller, duration_s=0.12)
    assert all((record.request.arrival_s or 0) < 0.12 for record in report.records)
    assert set(statuses(report)) == {OK}


async def test_a_closed_loop_pauses_after_a_failure(monkeypatch):
    monkeypatch.setattr(bench_run, "_PAUSE_AFTER_FAILURE_S", 0.02)
    report = await run(load(ClosedLoop(2), None), Scripted(failing=range(10**6)), duration_s=0.2)
    assert 2 <= len(report.records) <= 22


async def test_stopping_ends_what_runs_and_keeps_what_there_is():
    stop, caller = asyncio.Event(), Scripted(0.02)
    seen = []

    def on_progress(progress: BenchProgress) -> None:
        seen.append(progress.ended)
        caller.seconds = 30.0
        if progress.running == 3:
            stop.set()

    report = await run(load(ClosedLoop(3), None), caller, stop=stop, on_progress=on_progress)
    assert report.was_stopped
    assert statuses(report).count(INTERRUPTED) == 3
    assert caller.now == 0
    assert seen[-1] <= len(report.ok)
    assert len(report.ok) >= 3
    assert report.summary()["failed_after_s"] is None


async def test_what_a_caller_raises_ends_the_run():
    with pytest.raises(ValueError, match="the caller's own"):
        await run(load(ClosedLoop(3)), Scripted(raising=4))


async def test_the_clients_own_load_is_measured():
    class Busy(Scripted):
        async def call(self, request, past, record):
            until = time.thread_time() + 0.01
            while time.thread_time() < until:
                pass
            await super().call(request, past, record)

    busy = await run(load(ClosedLoop(1), 30), Busy())
    idle = await run(load(ClosedLoop(1), 3), Scripted(0.1))
    assert idle.client.loop_share < busy.client.loop_share
    assert idle.client.loop_share < 0.5
    assert busy.client.busiest_second_share > idle.client.busiest_second_share
    assert busy.client.process_share >= busy.client.loop_share * 0.9

"""Requests are sent when they are due, and conversations grow by what the engine really said; without any engine."""

import asyncio
from collections.abc import Callable

import pytest
from cpu_bench.schedule import AddTokens, Arrival, Schedule, send_all
from cpu_bench.wire import Work


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_without_times_all_are_due_at_once(clock: Clock) -> None:
    schedule = Schedule(Work([([1], 1), ([2], 2)]), clock)
    assert schedule.take_due() == [Arrival(0, [1], 1), Arrival(1, [2], 2)]
    assert schedule.seconds_to_next() is None
    for number, ids in ((0, [7]), (1, [8, 9])):
        clock.now += 1
        schedule.add_tokens(number, ids)
        schedule.finish(number)
    assert schedule.is_over
    ran = schedule.ran({"lag": 1.0})
    assert (ran.began, ran.ended, ran.arrivals, ran.extra) == (100.0, 102.0, [100.0, 100.0], {"lag": 1.0})
    assert ran.events == [[(101.0, 1)], [(102.0, 2)]]


def test_a_request_that_is_taken_late_has_arrived_in_time(clock: Clock) -> None:
    schedule = Schedule(Work([([1], 1), ([2], 1), ([3], 1)], [0.5, 2.0, 9.0]), clock)
    assert schedule.take_due() == []
    assert schedule.seconds_to_next() == 0.5
    clock.now = 103.0
    assert [arrival.number for arrival in schedule.take_due(limit=1)] == [0]
    assert [arrival.number for arrival in schedule.take_due(limit=1)] == [1]
    assert schedule.take_due() == []
    assert schedule.seconds_to_next() == 6.0
    assert schedule.ran().arrivals[:2] == [100.5, 102.0]


def test_a_turn_has_the_history_and_waits_for_the_pause(clock: Clock) -> None:
    work = Work([([1], 2), ([2], 1), ([3], 1), ([51], 1), ([52], 1), ([53], 1)], turns=3, pause_s=2.0)
    schedule = Schedule(work, clock)
    assert [(arrival.number, arrival.prompt) for arrival in schedule.take_due()] == [(0, [1]), (3, [51])]
    schedule.add_tokens(0, [10])
    schedule.add_tokens(0, [11], at=104.0)
    schedule.finish(0, at=104.0)
    assert schedule.take_due() == []
    clock.now = 106.0
    assert schedule.take_due() == [Arrival(1, [1, 10, 11, 2], 1)]
    schedule.add_tokens(1, [12])
    schedule.finish(1)
    clock.now = 108.0
    assert schedule.take_due() == [Arrival(2, [1, 10, 11, 2, 12, 3], 1)]
    schedule.finish(2)
    assert schedule.seconds_to_next() is None
    assert not schedule.is_over
    assert schedule.ran().arrivals[:3] == [100.0, 106.0, 108.0]


def test_an_engine_that_lost_a_request_is_found(clock: Clock) -> None:
    schedule = Schedule(Work([([1], 1)]), clock)
    schedule.take_due()
    with pytest.raises(RuntimeError, match="some have not finished"):
        schedule.sleep_to_next()


def echo(prompts: list[list[int]]) -> Callable[[Arrival, AddTokens], "asyncio.Future[None]"]:
    async def generate(arrival: Arrival, add_tokens: AddTokens) -> None:
        prompts.append(arrival.prompt)
        for _ in range(arrival.num_output):
            await asyncio.sleep(0)
            add_tokens([100 + arrival.number])

    return generate  # type: ignore[return-value]


async def test_conversations_are_played_to_their_end() -> None:
    prompts: list[list[int]] = []
    work = Work([([1], 2), ([2], 1), ([3], 1), ([4], 1)], turns=2, pause_s=0.001)
    schedule = await send_all(work, echo(prompts))
    assert sorted(prompts) == [[1], [1, 100, 100, 2], [3], [3, 102, 4]]
    ran = schedule.ran()
    assert [sum(tokens for _, tokens in events) for events in ran.events] == [2, 1, 1, 1]
    ended = ran.events[0][-1][0]
    assert ran.arrivals[1] >= ended + 0.001


async def test_requests_do_not_wait_for_earlier_ones() -> None:
    both = asyncio.Event()
    running = 0

    async def generate(arrival: Arrival, add_tokens: AddTokens) -> None:
        nonlocal running
        running += 1
        if running == 2:
            both.set()
        await both.wait()
        add_tokens([1])

    async with asyncio.timeout(20):
        schedule = await send_all(Work([([1], 1), ([2], 1)], [0.0, 0.002]), generate)
    assert schedule.is_over


async def test_the_first_failure_ends_the_run() -> None:
    async def generate(arrival: Arrival, add_tokens: AddTokens) -> None:
        if arrival.number:
            raise RuntimeError("out of slots")
        await asyncio.Event().wait()

    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError, match="out of slots"):
            await send_all(Work([([1], 1), ([2], 1)]), generate)

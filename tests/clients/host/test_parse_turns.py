"""Turns for parsing bodies: one at a time, by tenants, with pauses."""

import asyncio
import threading

import pytest

from penstock.clients.host.parse_turns import ParseTurns


class Clock:
    """Tells the time that it is told."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def slept(monkeypatch):
    """The pauses that were made, of which none takes time."""
    pauses: list[float] = []
    sleep, thread = asyncio.sleep, threading.get_ident()

    async def note(seconds, *rest):
        if threading.get_ident() != thread:  # services of other tests run on loops of their own
            await sleep(seconds, *rest)
            return
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr("penstock.clients.host.parse_turns.asyncio.sleep", note)
    return pauses


async def run(turns, tenant, done, name):
    async with turns.turn(tenant):
        await asyncio.sleep(0)
        done.append(name)


async def test_tenants_take_turns_regardless_of_volume():
    turns, done = ParseTurns(), list[str]()
    names = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")]
    await asyncio.gather(*(run(turns, tenant, done, name) for tenant, name in names))
    assert done == ["a1", "a2", "b1", "c1", "a3", "b2"]
    assert turns.num_waiting == 0


async def test_one_body_at_a_time():
    turns = ParseTurns()
    async with turns.turn("a"):
        waiting = asyncio.create_task(run(turns, "b", [], "b"))
        await asyncio.sleep(0)
        assert turns.num_waiting == 1
    await waiting
    assert turns.num_waiting == 0


async def test_who_leaves_while_waiting_gives_the_turn_up():
    turns, done = ParseTurns(), list[str]()
    async with turns.turn("a"):
        first, second = (asyncio.create_task(run(turns, "b", done, name)) for name in ("b1", "b2"))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert turns.num_waiting == 1
    await second
    assert done == ["b2"]


async def test_who_leaves_just_when_the_turn_comes_passes_it_on():
    turns, done = ParseTurns(), list[str]()
    async with turns.turn("a"):
        first, second = (asyncio.create_task(run(turns, "b", done, name)) for name in ("b1", "b2"))
        await asyncio.sleep(0)
    first.cancel()  # it has the turn, and has not run since
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert done == ["b2"]


async def test_a_turn_that_fails_is_passed_on():
    turns, done = ParseTurns(), list[str]()
    with pytest.raises(ValueError, match="no JSON"):
        async with turns.turn("a"):
            raise ValueError("no JSON")
    await run(turns, "a", done, "a")
    assert done == ["a"]


@pytest.mark.parametrize(("took_s", "pause_s"), [(0.0, 0.0), (0.002, 0.002), (0.05, 0.3), (5.0, 1.0)])
async def test_the_longer_a_portion_the_longer_the_pause(slept, took_s, pause_s):
    clock = Clock()
    turns = ParseTurns(clock)
    with turns.portion():
        clock.now += took_s
    await turns.pause()
    assert slept == [pytest.approx(pause_s)]


async def test_a_short_portion_does_not_end_the_pause_after_a_long_one(slept):
    clock = Clock()
    turns = ParseTurns(clock)
    with turns.portion():
        clock.now += 0.1
    with turns.portion():
        clock.now += 0.001
    await turns.pause()
    assert slept == [pytest.approx(0.599)]

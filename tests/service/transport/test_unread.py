"""Answers that nobody reads: which of them end, and that their end costs little."""

import asyncio
import itertools

import pytest

from penstock.service.transport import call_end, unread
from penstock.service.transport.unread import CALL_BYTES, UnreadAnswers

NOW = 100.0


class Ended:
    """In place of what ends calls."""

    def __init__(self):
        self.tasks = []

    def end(self, task):
        self.tasks.append(task)


@pytest.fixture
def answers(monkeypatch):
    """Those of tenants, and ``check`` for who is ended."""
    monkeypatch.setattr(unread, "SOON_S", 0.0)
    monkeypatch.setattr(unread, "CHECK_S", 3600.0)
    found = UnreadAnswers()
    monkeypatch.setattr(found, "ender", Ended())
    return found


async def waiting(answers, tenant, num_bytes):
    added = asyncio.Event()

    async def wait():
        answers.add_answer(tenant, "id", num_bytes - CALL_BYTES)
        added.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await added.wait()
    return task


async def test_where_all_have_too_much_the_tenant_with_the_most_loses_its_oldest(answers, monkeypatch):
    """And not whoever has waited the longest."""
    monkeypatch.setattr(unread, "MAX_BYTES", 500_000)
    slow = await waiting(answers, "slow", 100_000)
    much = [await waiting(answers, "much", 100_000) for _ in range(6)]
    answers._check()
    assert answers.ender.tasks == much[:2]
    assert slow not in answers.ender.tasks


async def test_a_tenant_with_too_much_loses_its_oldest(answers, monkeypatch):
    monkeypatch.setattr(unread, "MAX_BYTES_OF_TENANT", 250_000)
    other = await waiting(answers, "b", 100_000)
    mine = [await waiting(answers, "a", 100_000) for _ in range(3)]
    answers._check()
    assert answers.ender.tasks == mine[:1]
    assert other not in answers.ender.tasks


async def test_many_small_answers_are_too_many(answers, monkeypatch):
    monkeypatch.setattr(unread, "MAX_BYTES_OF_TENANT", 3 * CALL_BYTES + 100)
    mine = [await waiting(answers, "a", CALL_BYTES + 2) for _ in range(5)]
    answers._check()
    assert answers.ender.tasks == mine[:2]


async def test_a_call_waits_until_large_answers_of_its_tenant_are_sent(answers, monkeypatch):
    monkeypatch.setattr(unread, "ROOM_OF_TENANT", 250_000)
    mine = [await waiting(answers, "a", 100_000) for _ in range(3)]
    calls = [asyncio.create_task(answers.wait_for_room("a")) for _ in range(2)]
    await answers.wait_for_room("b")
    await asyncio.sleep(0)
    assert not any(call.done() for call in calls)
    calls[0].cancel()
    mine[1].cancel()
    await calls[1]
    await asyncio.wait(calls)
    assert calls[0].cancelled()
    for task in mine:
        task.cancel()
    await asyncio.wait(mine)
    assert not answers._large_bytes
    assert not answers._sent


async def test_small_answers_do_not_make_calls_wait(answers, monkeypatch):
    monkeypatch.setattr(unread, "ROOM_OF_TENANT", 0)
    await waiting(answers, "a", CALL_BYTES + unread.LARGE_BYTES)
    await answers.wait_for_room("a")


async def test_all_tasks_are_looked_at_once_for_all_calls_that_end(monkeypatch):
    """And few calls end in one turn of the loop."""
    monkeypatch.setattr(call_end, "GATHER_S", 0.0)
    monkeypatch.setattr(call_end, "AT_ONCE", 10)
    num_looks, all_tasks = 0, asyncio.all_tasks

    def counted():
        nonlocal num_looks
        num_looks += 1
        return all_tasks()

    monkeypatch.setattr(asyncio, "all_tasks", counted)
    sleeping = asyncio.Event()
    calls = [
        (asyncio.create_task(sleeping.wait()), asyncio.create_task(sleeping.wait(), name="rpc_task")) for _ in range(25)
    ]
    other = asyncio.create_task(sleeping.wait(), name="rpc_task")
    handlers = {outer: handler for handler, outer in calls} | {other: other}
    monkeypatch.setattr(call_end, "_known_to", lambda task: [handlers[task]])
    ender = call_end.CallEnder()
    for handler, _ in calls:
        ender.end(handler)
    num_ended = [0]
    while num_ended[-1] < 50:
        await asyncio.sleep(0)
        num_ended.append(sum(task.cancelled() for call in calls for task in call))
    assert num_looks == 1
    assert max(after - before for before, after in itertools.pairwise(num_ended)) <= 20
    assert not other.done()
    other.cancel()

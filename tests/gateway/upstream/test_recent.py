"""One answer for everyone who asks at the same time."""

import asyncio

import pytest

from penstock.clients.gateway.upstream.recent import Recent


class Question:
    """Counts how often it is asked; answers when it may."""

    def __init__(self):
        self.num_asked = 0
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self):
        self.num_asked += 1
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return self.num_asked


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("penstock.clients.gateway.upstream.recent.time.monotonic", lambda: now[0])
    return now


async def test_those_who_ask_at_once_share_an_answer_and_so_do_those_soon_after(clock):
    question = Question()
    recent = Recent(question, 1.0)
    asking = [asyncio.create_task(recent.get()) for _ in range(100)]
    await asyncio.sleep(0)
    question.may_answer.set()
    assert await asyncio.gather(*asking) == [1] * 100
    assert await recent.get() == 1
    clock[0] += 1.0
    assert await recent.get() == 2


async def test_a_failure_is_everyones_and_is_not_kept():
    question = Question()
    recent = Recent(question, 1000.0)
    question.error = OSError("gone")
    question.may_answer.set()
    results = await asyncio.gather(*(recent.get() for _ in range(3)), return_exceptions=True)
    assert [str(each) for each in results] == ["gone"] * 3
    question.error = None
    assert await recent.get() == 2


async def test_one_who_goes_takes_no_answer_with_them():
    question = Question()
    recent = Recent(question, 1000.0)
    first, second = (asyncio.create_task(recent.get()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    question.may_answer.set()
    assert await second == 1

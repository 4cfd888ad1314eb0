"""A client with a list of services: what stops at one of them continues at the next, and what cannot does not."""

import asyncio
import hashlib
from typing import Any

import grpc
import pytest

from penstock.clients import AsyncClient, Client, RequestFailed
from penstock.clients.events import Delta, Event, Finished, FinishReason, Injected, collect
from penstock.clients.failover import carried_request
from penstock.models.checkpoint.digest import CheckpointDigest
from penstock.scheduler.testing.fake_executor import FakeExecutor

OPTIONS: Any = {"max_tokens": 120, "seed": 3, "ignore_eos": True}
OTHER = CheckpointDigest(b"1" * 8, b"2" * 8, b"3" * 8)


def hashed_byte(history, sampling):
    """Bytes of characters of two bytes, and letters, which depend on the seed and on all before them."""
    if history[-1] in (0xC3, 0xC4):
        return 0xA9
    draw = hashlib.sha256(f"{sampling.seed} {history[-30:]} {len(history)}".encode()).digest()[0]
    return 0xC3 + draw % 2 if draw < 100 else ord("a") + draw % 5


def worker(seconds_per_step=0.002):
    return FakeExecutor(vocab_size=258, next_token=hashed_byte, seconds_per_step=seconds_per_step)


@pytest.fixture
def at_once(monkeypatch):
    """No pauses between attempts."""
    monkeypatch.setattr(carried_request, "_DELAYS_S", (0.0,) * carried_request.MAX_ATTEMPTS)


async def events_of(request, seen, number=20):
    """All events; ``seen`` is set after so many deltas."""
    events = []
    async for event in request:
        events.append(event)
        if sum(isinstance(each, Delta) for each in events) == number:
            seen.set()
    return events


async def rest(request):
    """What is left."""
    events = []
    while more := await request.take():
        events += more
    return events


async def undisturbed(service, prompt="hello", **options):
    async with AsyncClient(service.target) as client:
        return (await client.complete(prompt, **OPTIONS, **options)).choices


@pytest.mark.parametrize("options", [{}, {"n": 2, "logprobs": 1}, {"stop": ["é\u0105é", "abcde", "never"]}])
async def test_a_service_that_shuts_down(start_service, options):
    """Its last deltas have what was held back: text that the stream would not have had."""
    first, second = await start_service(worker(), grace_s=0.0), await start_service(worker())
    expected = await undisturbed(second, **options)
    seen = asyncio.Event()
    async with AsyncClient(f"{first.target}, {second.target}") as client:
        request = client.generate("hello", **OPTIONS, **options)
        reading = asyncio.create_task(events_of(request, seen))
        await seen.wait()
        await first.server.stop()
        assert collect(await reading, options.get("n", 1)).choices == expected
        assert client.num_moves >= 1
        assert (await client.model()).name == "bytes"
        assert await client.tokenize("ab") == [97, 98]


async def test_a_service_that_drains_gets_no_new_request(start_service):
    first, second = await start_service(worker()), await start_service(worker())
    expected = await undisturbed(second)
    seen = asyncio.Event()
    async with AsyncClient(f"{first.target},{second.target}") as client:
        reading = asyncio.create_task(events_of(client.generate("hello", **OPTIONS), seen))
        await seen.wait()
        first.engine.drain()
        answers = await asyncio.gather(*(client.complete("hello", **OPTIONS) for _ in range(3)))
        assert [answer.choices for answer in answers] == [expected] * 3
        assert collect(await reading, 1).choices == expected
        assert client.num_moves == 3
    assert not first.engine.stats().requests
    assert not second.engine.stats().requests


async def test_another_model_takes_nothing_over(start_service, at_once):
    """The request fails as if there had been no other service."""
    first, second = await start_service(worker(), grace_s=0.0), await start_service(worker(), checkpoint=OTHER)
    seen = asyncio.Event()
    async with AsyncClient(f"{first.target},{second.target}") as client:
        request = client.generate("hello", **OPTIONS)
        reading = asyncio.create_task(events_of(request, seen))
        await seen.wait()
        await first.server.stop()
        with pytest.raises(RequestFailed) as failure:
            await reading
        assert failure.value.code is grpc.StatusCode.UNAVAILABLE
        assert (await client.complete("hello", max_tokens=3)).usage.output_tokens == 3


async def test_no_service_is_left(start_service, at_once):
    first, second = await start_service(worker(), grace_s=0.0), await start_service(worker(), grace_s=0.0)
    seen = asyncio.Event()
    async with AsyncClient(f"{first.target},{second.target}") as client:
        reading = asyncio.create_task(events_of(client.generate("hello", **OPTIONS), seen))
        await seen.wait()
        await asyncio.gather(first.server.stop(), second.server.stop())
        with pytest.raises(RequestFailed) as failure:
            await reading
        assert failure.value.code is grpc.StatusCode.UNAVAILABLE
        assert client.num_moves <= 2 * carried_request.MAX_ATTEMPTS
        with pytest.raises(RequestFailed):
            await client.complete("hello")


async def test_cancelled_while_no_service_is_left(start_service, monkeypatch):
    monkeypatch.setattr(carried_request, "_DELAYS_S", (600.0,) * carried_request.MAX_ATTEMPTS)
    first = await start_service(worker(), grace_s=0.0)
    async with AsyncClient(f"{first.target},{first.target}") as client:
        request = client.generate("hello", **OPTIONS)
        async with request:
            assert await request.take()
            await first.server.stop()
            carried = request._carried
            assert carried is not None
            while carried._waiting is None:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.001)
            request.cancel()
            end = (await rest(request))[-1]
            assert isinstance(end, Finished)
            assert end.reason is FinishReason.CANCELLED
            assert end.usage.prompt_tokens == len("hello")
            assert end.usage.output_tokens > 0
            assert not end.superseded


async def test_a_request_that_waits_to_move_is_superseded(start_service, monkeypatch):
    """Its replica is gone, so no service can end it."""
    first, second = await start_service(worker(), grace_s=0.0), await start_service(worker())
    target = f"{first.target},{second.target}"
    async with AsyncClient(target) as client, client.generate("hello", **OPTIONS) as older:
        assert await older.take()
        monkeypatch.setattr(carried_request, "_DELAYS_S", (600.0,) * carried_request.MAX_ATTEMPTS)
        await first.server.stop()
        carried = older._carried
        assert carried is not None
        while carried._waiting is None:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)
        monkeypatch.setattr(carried_request, "_DELAYS_S", (0.0,) * carried_request.MAX_ATTEMPTS)
        newer = client.generate("hello you", max_tokens=5)
        newer.supersede(older)
        assert (await newer.completion()).usage.output_tokens == 5
        end = (await rest(older))[-1]
        assert isinstance(end, Finished)
        assert end.superseded


async def test_a_deadline_counts_from_the_beginning(start_service):
    first, second = await start_service(worker(), grace_s=0.0), await start_service(worker(0.02))
    seen = asyncio.Event()
    async with AsyncClient(f"{first.target},{second.target}") as client:
        request = client.generate("hello", timeout=1.0, max_tokens=3000, seed=1, ignore_eos=True)
        reading = asyncio.create_task(events_of(request, seen))
        await seen.wait()
        await first.server.stop()
        with pytest.raises(RequestFailed) as failure:
            await reading
        assert failure.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_injected_tokens_stay_where_they_are(start_service):
    """Another service could not put them into the same place."""
    first, second = await start_service(worker(), grace_s=0.0), await start_service(worker())
    async with AsyncClient(f"{first.target},{second.target}") as client:
        request = client.generate("hello", max_tokens=3000, ignore_eos=True, format="text")
        async with request:
            await request.take()
            request.append("!")
            events: list[Event] = []
            while not any(isinstance(event, Injected) for event in events):
                events += await request.take()
            assert not any(event.token_ids for event in events + await request.take() if isinstance(event, Delta))
            await first.server.stop()
            with pytest.raises(RequestFailed) as failure:
                await rest(request)
        assert failure.value.code is grpc.StatusCode.UNAVAILABLE
        assert client.num_moves == 0


async def test_a_changed_limit_goes_along(start_service):
    first, second = await start_service(worker(), grace_s=0.0), await start_service(worker())
    async with AsyncClient(f"{first.target},{second.target}") as client:
        request = client.generate("hello", max_tokens=3000, ignore_eos=True, format="text")
        async with request:
            events = await request.take()
            request.update(max_tokens=150)
            await asyncio.sleep(0.02)
            await first.server.stop()
            while more := await request.take():
                events += more
        answer = collect(events, 1)
        assert answer.usage.output_tokens == 150
        assert answer.token_ids == []


async def test_the_first_target_may_be_down(start_service):
    first, second = await start_service(worker()), await start_service(worker())
    await first.server.stop()

    def work():
        with Client(f"{first.target},{second.target}") as client:
            client.wait_ready(60)
            return client.complete("abc", max_tokens=3).usage.output_tokens, client.model().name

    assert await asyncio.to_thread(work) == (3, "bytes")

"""Prompts in pieces, injection, superseding and idempotency keys with the Python client."""

import pytest
from letters import letters, paced

from penstock.clients import AsyncClient, Delta, Finished, FinishReason, FrameRefused, Injected, RequestFailed


@pytest.fixture
async def client(start_service):
    service = await start_service(paced(0.005))
    async with AsyncClient(service.target) as client:
        yield client


async def test_a_prompt_in_pieces(client):
    async with client.open_prompt(max_tokens=5) as request:
        assert [request.append(piece) for piece in ("he", "avy")] == [1, 2]
        request.append("llo", replace_from=2)
        refused_id = request.append([1, 2])
        request.commit()
        events = [event async for event in request]
    [refused] = [event for event in events if isinstance(event, FrameRefused)]
    assert (refused.frame, refused.failure.reason) == ("append", "INVALID_FIELD")
    assert refused.append_id == refused_id == 4
    assert "".join(event.text for event in events if isinstance(event, Delta)) == letters(5, 5)
    assert events[-1].usage.prompt_tokens == 5


@pytest.mark.parametrize("content", ["12", [49, 50]])
async def test_injection(client, content):
    async with client.generate("hello") as request:
        events = await request.take()
        append_id = request.append(content)
        while not (injected := [event for event in events if isinstance(event, Injected)]):
            more = await request.take()
            assert more, "the request ended"
            events += more
        request.update(max_tokens=injected[0].output_tokens + 10)
        events += [event async for event in request]
    output = "".join(event.text for event in events if isinstance(event, Delta))
    before = injected[0].output_tokens
    assert injected[0].injected_tokens == 2
    assert injected[0].append_ids == [append_id] == [1]
    assert output[:before] == letters(5, before)
    assert output[before:] == letters(5 + before + 2, len(output) - before)
    assert events[-1].usage.prompt_tokens == 7


async def test_a_request_is_computed_once(client):
    first = await client.complete("hello", max_tokens=3, idempotency_key="mine")
    with pytest.raises(RequestFailed, match="ALREADY_EXISTS") as caught:
        await client.complete("hello", max_tokens=3, idempotency_key="mine")
    assert caught.value.reason == "DUPLICATE_REQUEST"
    assert first.finish_reason is FinishReason.LENGTH


async def test_a_request_that_supersedes_another(client):
    old, new = client.generate("on and on"), client.generate("and on", max_tokens=3)
    await old.take()
    new.supersede(old)
    assert (await new.completion()).text == letters(6, 3)
    events = await old.take()
    while not isinstance(events[-1], Finished):
        events += await old.take()
    assert (events[-1].reason, events[-1].superseded) == (FinishReason.CANCELLED, True)


async def test_a_request_supersedes_none_that_has_ended_or_was_never_sent(client):
    ended = client.generate("on and on", max_tokens=1)
    await ended.completion()
    for old in (ended, client.generate("never sent")):
        new = client.generate("late", max_tokens=2)
        new.supersede(old)
        assert (await new.completion()).text == letters(4, 2)
        new.supersede(old)  # ignored: the new one has begun

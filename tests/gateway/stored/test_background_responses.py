"""Responses in the background, by the openai package: polled, followed, cancelled, ended early, and what a restart
finds of them."""

import asyncio
import math
import shutil
from contextlib import asynccontextmanager

import openai
import pytest
from waiting import until
from wire.http_get import plain_client

from penstock.scheduler.request import EngineFinishReason

LOST = "the gateway ended before the response was complete"


def says_x(history, sampling):
    return ord("x")


def open_client(base):
    return openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=120, http_client=plain_client(base))


@asynccontextmanager
async def client_of(http):
    async with open_client(f"{http.base_url}/v1") as client:
        yield client


@pytest.fixture
async def slow(start_gateway):
    """A gateway in front of a model that writes without end, slowly."""
    return await start_gateway(says_x, seconds_per_step=0.002)


@pytest.fixture
async def client(slow):
    async with open_client(slow.base) as client:
        yield client


def begin(client, **options):
    return client.responses.create(model="bytes", input="a", background=True, **options)


async def ended(client, response_id):
    """The response, once it has ended."""
    while (response := await client.responses.retrieve(response_id)).status == "in_progress":  # noqa: ASYNC110 - as its clients do
        await asyncio.sleep(0.02)
    return response


def timeless(response):
    found = response.model_dump(exclude={"id", "created_at", "completed_at", "background"})
    found["usage"].pop("input_tokens_details")
    for item in found["output"]:
        item.pop("id")
    return found


async def test_it_is_polled(client):
    begun = await begin(client, max_output_tokens=30)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    response = await ended(client, begun.id)
    assert (response.status, response.output_text, response.id) == ("incomplete", "x" * 30, begun.id)
    foreground = await client.responses.create(model="bytes", input="a", max_output_tokens=30)
    assert timeless(response) == timeless(foreground)
    assert (await client.responses.cancel(begun.id)).status == "incomplete"  # too late: it changes nothing
    following = await client.responses.create(
        model="bytes", input="b", previous_response_id=begun.id, max_output_tokens=1
    )
    assert following.usage.input_tokens > response.usage.total_tokens


async def test_its_events_are_followed_from_any_of_them(client):
    """While it runs, after its own stream was left, and after it has ended."""
    events = []
    async with await begin(client, stream=True, max_output_tokens=60) as stream:
        async for event in stream:
            events.append(event)
            if event.sequence_number == 10:
                break
    assert events[0].response.status == "in_progress"
    response_id = events[0].response.id
    events += [event async for event in await client.responses.retrieve(response_id, stream=True, starting_after=10)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "x" * 60
    assert events[-1].type == "response.incomplete"
    assert events[-1].response == await client.responses.retrieve(response_id)
    for number in (-1, 0, 12, len(events) - 1):
        again = await client.responses.retrieve(response_id, stream=True, starting_after=number)
        assert [event async for event in again] == events[number + 1 :]


async def test_metrics_count_what_is_stored_and_what_goes_on(slow, client):
    def numbers():
        read = slow.app.state.gateway_metrics.registry.get_sample_value
        names = ("stored_responses", "stored_bytes", "background_responses")
        return [read(f"penstock_gateway_{name}") for name in names]

    assert numbers() == [0, 0, 0]
    begun = await begin(client)
    (number, num_bytes, num_live) = numbers()
    assert (number, num_live) == (1, 1)
    assert num_bytes > 1024
    await client.responses.cancel(begun.id)
    assert (numbers()[0], numbers()[2]) == (1, 0)
    await client.responses.delete(begun.id)
    assert numbers() == [0, 0, 0]


async def test_several_clients_follow_one(client):
    async with await begin(client, stream=True, max_output_tokens=40) as stream:
        begun = await anext(aiter(stream))
    followers = [await client.responses.retrieve(begun.response.id, stream=True) for _ in range(2)]
    first, second = [[event async for event in follower] for follower in followers]
    assert first == second
    assert first[-1].response.status == "incomplete"


async def test_one_that_was_not_streamed_is_not_followed(client):
    begun = await begin(client)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.retrieve(begun.id, stream=True)
    assert caught.value.param == "stream"


@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_cancelled_with_its_output_so_far(slow, client, stream):
    begun = await begin(client, stream=stream)
    if stream:
        events = aiter(begun)
        begun = (await anext(events)).response
    await until(lambda: slow.engine.stats().output_tokens > 10)
    cancelled = await client.responses.cancel(begun.id)
    assert (cancelled.status, cancelled.error, cancelled.output[0].status) == ("cancelled", None, "incomplete")
    assert set(cancelled.output_text) == {"x"}
    assert await client.responses.cancel(begun.id) == cancelled == await client.responses.retrieve(begun.id)
    await slow.until(lambda stats: stats.requests == 0)
    if stream:
        *_, last = [event async for event in events]
        assert (last.type, last.response) == ("response.incomplete", cancelled)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="bytes", input="b", previous_response_id=begun.id)
    assert "this response is cancelled" in caught.value.message


async def test_one_that_is_deleted_ends(slow, client):
    begun = await begin(client)
    await client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(begun.id)
    await slow.until(lambda stats: stats.requests == 0)


async def test_one_that_goes_on_is_not_continued(client):
    begun = await begin(client)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="bytes", input="b", previous_response_id=begun.id)
    assert "still in progress" in caught.value.message


async def test_their_number_is_limited(start_gateway):
    gateway = await start_gateway(says_x, seconds_per_step=0.002, max_background=2)
    async with open_client(gateway.base) as client:
        begun = [await begin(client) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as caught:
            await begin(client)
        assert caught.value.code == "background_full"
        await client.responses.cancel(begun[0].id)
        assert (await begin(client, max_output_tokens=1)).status == "in_progress"


async def test_what_the_service_refuses_is_refused_at_once(client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="bytes", input="a" * 5000, background=True)
    assert caught.value.code == "context_length_exceeded"


async def test_one_without_room_is_refused(start_gateway):
    gateway = await start_gateway(max_responses_bytes=6000)
    refused = await gateway.post("/v1/responses", input="a" * 2000, background=True)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
    await gateway.until(lambda stats: stats.requests == 0)


async def test_one_whose_output_has_no_room_has_failed(start_gateway):
    gateway = await start_gateway(says_x, max_responses_bytes=6000)
    async with open_client(gateway.base) as client:
        events = [event async for event in await begin(client, stream=True, max_output_tokens=1500)]
        response = await client.responses.retrieve(events[0].response.id)
    assert (response.status, response.output) == ("failed", [])
    assert "a tenant may store 3,000" in response.error.message
    assert (events[-1].type, events[-1].response) == ("response.failed", response)


async def test_one_that_fails_says_why_and_keeps_its_output(slow, client):
    raw = await client.responses.with_raw_response.create(model="bytes", input="a", background=True)
    await until(lambda: slow.engine.stats().output_tokens > 10)
    slow.engine.abort(raw.headers["x-request-id"], EngineFinishReason.DEADLINE)
    response = await ended(client, raw.parse().id)
    assert (response.status, response.error.code) == ("failed", "server_error")
    assert "deadline" in response.error.message
    assert set(response.output_text) == {"x"}


async def test_a_restart_finds_what_was_stored(start_gateway, http_before, tmp_path):
    service = await start_gateway(says_x)
    settings = {"responses_file": tmp_path / "responses"}
    async with http_before(service.target, **settings) as (_, http), client_of(http) as client:
        first = await client.responses.create(model="bytes", input="a", max_output_tokens=3)
        deleted = await client.responses.create(model="bytes", input="b", max_output_tokens=3)
        second = await client.responses.create(
            model="bytes", input="c", previous_response_id=first.id, max_output_tokens=3
        )
        events = [event async for event in await begin(client, stream=True, max_output_tokens=3)]
        await client.responses.delete(deleted.id)
        await client.responses.delete(first.id)
    async with http_before(service.target, **settings) as (_, http), client_of(http) as client:
        assert await client.responses.retrieve(second.id) == second
        followed = await client.responses.retrieve(events[0].response.id, stream=True, starting_after=2)
        assert [event async for event in followed] == events[3:]
        for gone in (first, deleted):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(gone.id)
        items = await client.responses.input_items.list(second.id, order="asc")
        assert [item.content[0].text for item in items.data] == ["a", "xxx", "c"]
        third = await client.responses.create(
            model="bytes", input="d", previous_response_id=second.id, max_output_tokens=3
        )
        assert third.usage.input_tokens > second.usage.total_tokens


async def test_a_stop_ends_those_that_go_on_and_says_so(start_gateway, http_before, tmp_path):
    service = await start_gateway(says_x, seconds_per_step=0.002)
    settings = {"responses_file": tmp_path / "responses"}
    async with http_before(service.target, **settings) as (_, http), client_of(http) as client:
        begun = await begin(client)
        await until(lambda: service.engine.stats().output_tokens > 10)
    await service.until(lambda stats: stats.requests == 0)
    async with http_before(service.target, **settings) as (_, http), client_of(http) as client:
        response = await client.responses.retrieve(begun.id)
        assert (response.status, response.error.code) == ("failed", "server_error")
        assert "the gateway was stopped" in response.error.message
        assert set(response.output_text) == {"x"}


async def test_a_stop_waits_for_those_that_end_in_time(start_gateway, http_before, tmp_path):
    """The model ends its output only once the gateway waits for it."""
    waits = False

    def says_x_until_then(history, sampling):
        return 256 if waits else ord("x")

    def stop_at():
        nonlocal waits
        waits = True
        return math.inf

    service = await start_gateway(says_x_until_then, seconds_per_step=0.002)
    settings = {"responses_file": tmp_path / "responses"}
    async with http_before(service.target, **settings) as (app, http), client_of(http) as client:
        begun = await begin(client)
        app.state.background_runs._stop_at = stop_at
    assert app.state.stop_at > 0  # the HTTP server sets it
    async with http_before(service.target, **settings) as (_, http), client_of(http) as client:
        assert (await client.responses.retrieve(begun.id)).status == "completed"


async def test_one_that_a_crash_interrupted_has_failed(start_gateway, http_before, tmp_path):
    """A copy of the files while a gateway uses them is what a crash leaves."""
    service = await start_gateway(says_x, seconds_per_step=0.002)
    path = tmp_path / "responses"
    async with http_before(service.target, responses_file=path) as (_, http), client_of(http) as client:
        begun = await begin(client)
        for name in ("responses", "responses-wal"):
            shutil.copy(tmp_path / name, tmp_path / f"left-{name}")
    async with (
        http_before(service.target, responses_file=tmp_path / "left-responses") as (_, http),
        client_of(http) as client,
    ):
        response = await client.responses.retrieve(begun.id)
        assert (response.status, response.error.message, response.output) == ("failed", LOST, [])
        assert (await client.responses.cancel(begun.id)).status == "failed"

"""The asynchronous client against a service that answers by the contract and fails where it is told to."""

import asyncio

import grpc
import pytest
from waiting import until

from penstock.clients import (
    Accepted,
    AsyncClient,
    Delta,
    Finished,
    FinishReason,
    FrameRefused,
    InvalidOption,
    PenstockError,
    RequestFailed,
    StreamBroken,
    Unreachable,
)
from penstock.clients.events import collect
from penstock.clients.stream import MAX_EVENTS_WAITING


@pytest.fixture
async def client(service):
    async with AsyncClient(service.target) as client:
        yield client


async def test_events_come_typed_and_in_order(client):
    async with client.generate("abc", logprobs=0) as request:
        events = [event async for event in request]
    assert [type(event) for event in events] == [Accepted, Delta, Delta, Delta, Finished]
    assert events[0].prompt_tokens == 3
    assert request.request_id == events[0].request_id == events[-1].request_id
    assert [event.text for event in events[1:4]] == ["a", "b", "c"]
    assert [event.token_ids for event in events[1:4]] == [[97], [98], [99]]
    assert events[1].logprobs.chosen == [-0.5]
    assert (events[2].end, events[3].end.reason) == (None, FinishReason.STOP)
    assert events[-1].usage.output_tokens == 3


async def test_complete_puts_the_answer_together(client, service):
    answer = await client.complete("hello", max_tokens=4, seed=7, logprobs=0)
    assert (answer.text, answer.token_ids) == ("hell", [ord(c) for c in "hell"])
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.usage.prompt_tokens == 5
    assert answer.finished.seed == 7
    assert len(answer.logprobs.chosen) == 4
    assert answer.request_id
    assert service.starts[0].sampling.max_tokens == 4


async def test_a_cancelled_request_can_be_completed_with_what_came(client):
    async with client.generate("endless") as request:
        await request.take()
        request.cancel()
        answer = await request.completion()
    assert answer.usage.output_tokens >= len(answer.text)
    assert answer.finished.reason is FinishReason.CANCELLED


async def test_a_request_that_is_cancelled_before_it_starts_ends_at_once(client):
    request = client.generate("endless")
    request.cancel()
    assert (await request.completion()).finished.reason is FinishReason.CANCELLED


async def test_an_update_is_sent_and_its_refusal_is_an_event(client, service):
    async with client.generate("endless") as request:
        await request.take()
        request.update(priority=-3, max_tokens=7, timeout=1500)
        request.update(max_tokens=3000)
        await until(lambda: len(service.updates) == 2)
        refused = None
        while refused is None:
            refused = next((event for event in await request.take() if isinstance(event, FrameRefused)), None)
    first, second = service.updates
    assert (first.priority, first.max_tokens, first.timeout_ms) == (-3, 7, 1_500_000)
    assert [field.name for field, _ in second.ListFields()] == ["ref", "max_tokens"]
    assert refused.failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.failure.message, refused.failure.reason) == ("too many", "INVALID_FIELD")


async def test_an_update_before_the_start_is_part_of_it(client, service):
    request = client.generate("hello", max_tokens=100, priority=1)
    request.update(max_tokens=3, timeout=5000)
    answer = await request.completion()
    assert not service.updates
    [start] = service.starts
    assert (start.sampling.max_tokens, start.priority, start.timeout_ms) == (3, 1, 5_000_000)
    request.update(max_tokens=5)  # it has ended: nothing happens
    assert answer.text


async def test_a_new_timeout_applies_to_an_unresponsive_service(client, monkeypatch):
    monkeypatch.setattr("penstock.clients.request_stream._DEADLINE_GRACE_SECONDS", 0.0)
    async with client.generate("silent", timeout=120) as request:
        taking = asyncio.create_task(request.take())
        await asyncio.sleep(0)
        request.update(timeout=0.05)
        with pytest.raises(RequestFailed, match="without a response"):
            await taking


@pytest.mark.parametrize(
    ("change", "field"),
    [({"priority": 1.5}, "priority"), ({"max_tokens": -1}, "max_tokens"), ({"timeout": 0}, "timeout")],
)
async def test_an_update_that_is_wrong_is_not_sent(client, service, change, field):
    async with client.generate("endless") as request:
        await request.take()
        with pytest.raises(InvalidOption) as caught:
            request.update(**change)
        assert caught.value.field == field
    assert not service.updates


async def test_a_request_goes_on_from_another(client, service):
    service.keeps = True
    first = await client.complete("hello", retain_ms=5000)
    assert first.finished.may_continue
    second = await client.complete("more", continue_from=first.request_id)
    assert second.usage.prompt_tokens == len("hellohello") + len("more")
    assert (service.starts[0].retain_ms, service.starts[1].continue_from) == (5000, first.request_id)
    with pytest.raises(RequestFailed) as caught:
        await client.complete("more", continue_from="nothing")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_an_answer_is_taken_once(client):
    async with client.generate("abc") as request:
        assert [event async for event in request]
        with pytest.raises(PenstockError, match="were taken already"):
            await request.completion()


async def test_choices_are_kept_apart(client):
    answer = await client.complete("ab", n=3)
    assert [choice.text for choice in answer.choices] == ["ab"] * 3
    assert {choice.finish_reason for choice in answer.choices} == {FinishReason.STOP}


@pytest.mark.parametrize(
    ("prompt", "text"), [("hi", "hi"), ([104, 105], "hi"), ([{"role": "user", "content": "hi"}], "hi")]
)
async def test_a_prompt_is_text_ids_or_messages(client, prompt, text):
    assert (await client.complete(prompt)).text == text


async def test_all_requests_share_one_stream(client, service):
    prompts = [f"prompt number {i}" for i in range(200)]
    answers = await asyncio.gather(*(client.complete(prompt) for prompt in prompts))
    assert [answer.text for answer in answers] == prompts
    assert service.streams == 1
    assert len({start.ref for start in service.starts}) == 200


async def test_nothing_is_sent_before_the_stream_is_used(client, service):
    client.generate("abc")
    await client.complete("next")
    assert [start.text for start in service.starts] == ["next"]


@pytest.mark.parametrize("leave", ["loop", "with", "stream", "error", "task"])
async def test_leaving_cancels_the_request_and_no_other(client, service, leave):
    async def consume():
        match leave:
            case "loop":
                async for event in client.generate("endless"):
                    if isinstance(event, Delta):
                        break
            case "with":
                async with client.generate("endless") as request:
                    await request.take()
            case "stream":
                async for _ in client.stream("endless"):
                    break
            case "error":
                with pytest.raises(ZeroDivisionError):
                    async with client.generate("endless"):
                        raise ZeroDivisionError
            case "task":
                await client.complete("hang")

    other = client.generate("endless")
    await other.take()
    task = asyncio.create_task(consume())
    if leave == "task":
        await until(lambda: len(service.starts) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        await task
    await until(lambda: len(service.cancelled) == 1)
    assert service.cancelled == [service.starts[1].ref]
    await other.take()
    assert await other.take()
    assert service.streams == 1


async def test_cancel_goes_on_to_finished_with_its_usage(client):
    async with client.generate("endless") as request:
        events = []
        async for event in request:
            events.append(event)
            if len(events) == 5:
                request.cancel()
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.CANCELLED
    assert events[-1].usage.output_tokens >= 3


async def test_a_failure_has_the_services_code_reason_and_violations(client):
    with pytest.raises(RequestFailed) as caught:
        await client.complete("fail INVALID_ARGUMENT")
    failure = caught.value
    assert (failure.code, failure.message) == (grpc.StatusCode.INVALID_ARGUMENT, "as you wish")
    assert failure.reason == "OUT_OF_BOUNDS"
    assert failure.violations == [("sampling.top_p", "must be above 0")]
    assert failure.request_id in str(failure)
    assert failure.finished
    assert failure.finished.usage.prompt_tokens == 21
    assert not failure.retryable


async def test_a_refusal_gives_a_retry_delay(client):
    with pytest.raises(RequestFailed) as caught:
        await client.complete("busy 1")
    assert caught.value.retryable
    assert caught.value.retry_after == pytest.approx(0.001)
    assert (await client.complete("busy 1")).text == "busy 1"


async def test_a_broken_stream_fails_what_it_carried_and_the_next_request_opens_another(client, service):
    running = client.generate("hang")
    await running.take()
    with pytest.raises(StreamBroken, match="the worker is gone"):
        await client.complete("break")
    with pytest.raises(StreamBroken) as caught:
        await running.take()
    assert caught.value.request_id == running.request_id != ""
    assert (await client.complete("again")).text == "again"
    assert service.streams == 2


async def test_the_services_status_is_reported_even_if_a_write_fails(client, service):
    """grpc.aio puts an INTERNAL of its own in its place, in four of five tries."""
    service.break_next = 1000
    for _ in range(20):
        failures = await asyncio.gather(*(client.complete(f"x {i}") for i in range(8)), return_exceptions=True)
        assert {str(failure) for failure in failures} == {"UNAVAILABLE: the worker is gone"}


async def test_what_came_before_a_break_is_delivered_first(client):
    request = client.generate("abc")
    async with request:
        await asyncio.sleep(0.05)
        with pytest.raises(StreamBroken):
            await client.complete("break")
        assert [event.text async for event in request if isinstance(event, Delta)] == ["a", "b", "c"]


async def test_a_slow_consumer_loses_nothing_buffers_little_and_delays_no_others(client):
    slow = client.generate("burst 5000", logprobs=0)
    first = await slow.take()
    for _ in range(3):
        assert (await client.complete("quick")).text == "quick"
    await until(lambda: slow._mailbox._events and isinstance(slow._mailbox._events[-1], Finished))
    assert len(slow._mailbox._events) <= MAX_EVENTS_WAITING + 1
    answer = collect([*first, *await slow.take()], 1)
    assert len(answer.text) == len(answer.token_ids) == 5000
    assert answer.logprobs
    assert len(answer.logprobs.chosen) == 5000


async def test_the_deadline_travels_and_a_silent_service_is_given_up(client, service, monkeypatch):
    monkeypatch.setattr("penstock.clients.request_stream._DEADLINE_GRACE_SECONDS", 0.02)
    with pytest.raises(RequestFailed, match="without a response") as caught:
        await client.complete("silent", timeout=0.03)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert service.starts[0].timeout_ms == 30
    await until(lambda: service.cancelled)


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ("hi", {"max_tokns": 3}, "max_tokns: unknown field; did you mean max_tokens?"),
        ("hi", {"max_tokens": "3"}, "max_tokens: expected an integer, got '3'"),
        ("hi", {"max_tokens": True}, "max_tokens: expected an integer, got True"),
        ("hi", {"seed": -1}, "seed: expected 0 to 9,223,372,036,854,775,807, got -1"),
        ("hi", {"stop_token_ids": 5}, "stop_token_ids: expected a list, got 5"),
        ("hi", {"logit_bias": {"a": 1}}, "logit_bias: expected token ids as keys, got 'a'"),
        ("hi", {"format": "words"}, "format: expected one of text, token_ids, text_and_token_ids, got 'words'"),
        ("hi", {"timeout": 0}, "timeout: expected seconds above 0, at most 86,400, got 0"),
        ([], {}, "prompt: it is empty"),
        ([1, "a"], {}, r"prompt[1]: expected a token id, got 'a'"),
        ([{"role": "user"}], {}, "messages[0]: expected an object with role and content, got {'role': 'user'}"),
        ("x" * (5 << 20), {}, "prompt: the request has 5,242,8"),
    ],
)
async def test_a_bad_option_is_named_before_anything_is_sent(client, service, prompt, options, says):
    with pytest.raises(InvalidOption) as caught:
        client.generate(prompt, **options)
    assert str(caught.value).startswith(says)
    assert caught.value.field == says.partition(":")[0]
    assert service.streams == 0


async def test_unary_calls(client):
    assert (await client.model()).name == "fake"
    assert [model.name for model in await client.models()] == ["fake", "other"]
    assert await client.tokenize("ab") == [97, 98]
    assert await client.detokenize([97, 98]) == "ab"
    rendered = await client.render_chat([{"role": "user", "content": "hi"}])
    assert (rendered.text, len(rendered.token_ids)) == ("<user>hi", 8)
    with pytest.raises(RequestFailed, match=r"INVALID_ARGUMENT: chat\.messages"):
        await client.render_chat([])


async def test_the_key_travels_in_metadata(service):
    async with AsyncClient(service.target, api_key="secret") as client:
        await client.complete("hi")
    assert service.metadata["authorization"] == "Bearer secret"


async def test_wait_ready_waits_for_serving(client, service):
    service.health = b"\x08\x02"
    with pytest.raises(RequestFailed, match="NOT_SERVING") as caught:
        await client.wait_ready(0.05)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    waiting = asyncio.create_task(client.wait_ready(10))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    service.health = b"\x08\x01"
    await waiting


async def test_nobody_listening(new_service):
    async with new_service().serving() as gone:
        target = gone.target
    async with AsyncClient(target) as client:
        with pytest.raises(Unreachable, match=f"no service answers at {target}: Connection refused"):
            await client.complete("hi")
        with pytest.raises(Unreachable):
            await client.model()


async def test_a_service_that_comes_back_is_found_again(new_service):
    async with new_service().serving() as fake:
        target = fake.target
        client = AsyncClient(target)
        await client.complete("hi")
        running = client.generate("hang")
        await running.take()
    with pytest.raises(StreamBroken):
        await running.take()
    async with new_service().serving(target):
        await client.wait_ready(20)
        assert (await client.complete("back")).text == "back"
    await client.close()


async def test_closing_ends_what_runs_and_the_stream(service):
    client = AsyncClient(service.target)
    running = client.generate("hang")
    await running.take()
    await client.close()
    with pytest.raises(RequestFailed, match="the client was closed"):
        await running.take()
    await until(lambda: service.streams_ended == 1)
    assert service.cancelled == [service.starts[0].ref]
    with pytest.raises(PenstockError, match="the client is closed"):
        await client.complete("hi")
    await client.close()

"""The ``openai`` package against a gateway whose model says what it is told to: tool calls, reasoning, text of all
kinds, whole and streamed, by the synchronous client and the asynchronous one; errors are the package's own."""

import asyncio
import hashlib
import json

import httpx
import openai
import pytest

from penstock.scheduler.config import SchedulerConfig

SAID = "Ein Käfer, 東京 and 🙂."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {name}.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "time")
]
ANSWERS = {
    "text": (SAID, SAID, "", [], "stop"),
    "a call": (CALL, "", "", [("weather", {"city": "Köln"})], "tool_calls"),
    "text and two calls": (
        f"I look.{CALL}{OTHER_CALL}",
        "I look.",
        "",
        [("weather", {"city": "Köln"}), ("time", {})],
        "tool_calls",
    ),
    "reasoning": (f"<think>Well.</think>{SAID}", SAID, "Well.", [], "stop"),
    "reasoning and a call": (f"<think>So.</think>{CALL}", "", "So.", [("weather", {"city": "Köln"})], "tool_calls"),
    "what only looks like a call": ("a <tool_cat>", "a <tool_cat>", "", [], "stop"),
}


@pytest.fixture(scope="module")
def client(scripted):
    with openai.OpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
async def asynchronous(scripted):
    async with openai.AsyncOpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def body(said, **options):
    return {"model": "gpt-4o", "messages": [{"role": "user", "content": f"SAY {said}"}], **options}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_taken_apart_whole_and_streamed_alike(name, client):
    said, content, reasoning, calls, finish = ANSWERS[name]
    (choice,) = client.chat.completions.create(**body(said, tools=TOOLS)).choices
    message = choice.message
    assert (message.content or "", getattr(message, "reasoning_content", None) or "") == (content, reasoning)
    assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []] == calls
    assert choice.finish_reason == finish
    # The package itself puts the parts together, and raises where they do not fit.
    with client.chat.completions.stream(**body(said, tools=TOOLS)) as stream:
        parts = [event.chunk for event in stream if event.type == "chunk"]
        (streamed,) = stream.get_final_completion().choices
    assert streamed.finish_reason == finish
    assert (streamed.message.content or "") == content
    assert [(c.function.name, c.function.arguments) for c in streamed.message.tool_calls or []] == [
        (c.function.name, c.function.arguments) for c in message.tool_calls or []
    ]
    told = [getattr(choice.delta, "reasoning_content", None) or "" for part in parts for choice in part.choices]
    assert "".join(told) == reasoning
    assert len(parts) > 2  # the role, some text or calls, and the end; a busy machine sends tokens together


def test_the_arguments_of_a_call_stream(client):
    parts = [
        call.function.arguments
        for part in client.chat.completions.create(**body(CALL, tools=TOOLS, stream=True))
        for choice in part.choices
        for call in choice.delta.tool_calls or []
    ]
    assert json.loads("".join(part or "" for part in parts)) == {"city": "Köln"}
    assert len(parts) > 1


def test_the_result_of_a_call_goes_back(client):
    messages = body(CALL)["messages"]
    message = client.chat.completions.create(**body(CALL, tools=TOOLS)).choices[0].message
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": f"SAY {SAID}"}]
    answer = client.chat.completions.create(model="gpt-4o", messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == SAID


async def test_the_asynchronous_client_and_many_at_once(asynchronous):
    async def one(number):
        said = f"{SAID} {number}"
        stream = await asynchronous.chat.completions.create(**body(said, stream=True))
        text = "".join([choice.delta.content or "" async for part in stream for choice in part.choices])
        whole = await asynchronous.completions.create(model="gpt-4o", prompt=f"SAY {said}", max_tokens=1)
        return text == said and bool(whole.choices)

    assert all(await asyncio.gather(*(one(number) for number in range(32))))


ERRORS = {
    "a wrong value": (body("x", temperature=-1), openai.BadRequestError, "temperature"),
    "a wrong type": (body("x", max_tokens="many"), openai.BadRequestError, "max_tokens"),
    "no messages": (body("x", messages=[]), openai.BadRequestError, "messages"),
    "another model": (body("x", model="nobody"), openai.NotFoundError, "model"),
    "a prompt that is too long": (body("x" * 5000), openai.BadRequestError, None),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_the_packages_own(name, stream, client):
    request, kind, param = ERRORS[name]
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**request, stream=stream)
    assert caught.value.param == param or param is None
    assert caught.value.message
    assert caught.value.request_id


def test_a_full_queue_is_the_packages_rate_limit(start_scripted):
    scheduler = SchedulerConfig(max_num_seqs=1, max_queued_requests=1)
    with (
        start_scripted(scheduler=scheduler) as base,
        openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=120) as client,
        client.chat.completions.create(**body("x" * 3000), stream=True) as running,
    ):
        next(running)
        next(running)
        with client.chat.completions.create(**body("x"), stream=True), pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(**body("x"))
    assert caught.value.code == "queue_full"
    assert float(caught.value.response.headers["retry-after"]) >= 1


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["gpt-4o"]
    assert client.models.retrieve("gpt-4o").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


# Identity -------------------------------------------------------------------------------------------------------------


KEYS = {"of-one": "one", "of-two": "two"}


@pytest.fixture(scope="module")
def keyed(start_scripted, tmp_path_factory, load_keys):
    """A service with keys; the gateway has none of its own."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    hashed = {hashlib.sha256(key.encode()).hexdigest(): tenant for key, tenant in KEYS.items()}
    path.write_text("".join(f"sha256:{digest} {tenant}\n" for digest, tenant in hashed.items()))
    with start_scripted(authenticator=load_keys(path)) as base:
        yield base


@pytest.mark.parametrize("key", KEYS)
def test_a_callers_key_is_passed_on(keyed, key):
    with openai.OpenAI(base_url=f"{keyed}/v1", api_key=key, max_retries=0, timeout=120) as client:
        assert client.chat.completions.create(**body(SAID)).choices[0].message.content == SAID
        assert len(list(client.chat.completions.create(**body(SAID), stream=True))) > 3


@pytest.mark.parametrize("key", ["of-nobody", "of-One"])
def test_a_wrong_key_is_reported_before_a_wrong_body(keyed, key):
    with openai.OpenAI(base_url=f"{keyed}/v1", api_key=key, max_retries=0, timeout=120) as client:
        for request in (body(SAID), body(SAID, temperature=-1), body(SAID, messages="none")):
            with pytest.raises(openai.AuthenticationError) as caught:
                client.chat.completions.create(**request)
            assert caught.value.code == "invalid_api_key"
            assert key.strip() not in str(caught.value)


def test_a_missing_key_is_reported_too(keyed):
    answer = httpx.post(f"{keyed}/v1/chat/completions", json=body(SAID))
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")

"""Stored responses, by the openai package: they are continued, fetched, listed and deleted.

The model says what the prompt tells it to after SAY, a byte a token.
"""

import hashlib
from typing import Any

import openai
import pytest
from wire.http_get import plain_client

from penstock.clients.gateway.stored import stored_responses
from penstock.scheduler.loop.engine import Engine

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
SHELL = {"type": "custom", "name": "shell"}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
SHELL_CALL = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls"}}\n</tool_call>'
UNKNOWN = f"resp_{'0' * 48}"


@pytest.fixture(scope="module")
def client(scripted):
    with openai.OpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def respond(client):
    def respond(given, **options):
        return client.responses.create(model="gpt-4o", input=given, **options)

    return respond


def without_ids(response):
    """What two answers to one conversation share."""
    found = response.model_dump(exclude={"id", "created_at", "completed_at", "previous_response_id", "usage"})
    for item in found["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return found | {"tokens": (response.usage.input_tokens, response.usage.output_tokens)}


def user(text):
    return {"role": "user", "content": text}


TURNS: dict[str, list[Any]] = {
    "text": ["SAY one", "SAY two", "SAY three"],
    "reasoning": ["SAY <think>hm</think>so", "SAY <think>well</think>then", "SAY three"],
    "messages": [[{"role": "developer", "content": "Be brief."}, user("q"), user("SAY a")], [user("p"), user("SAY b")]],
    "an answer of nothing": ["SAY ", "SAY b"],
}


@pytest.mark.parametrize("name", TURNS)
def test_a_chain_of_turns_gets_the_answers_of_the_whole_conversation(respond, name):
    conversation: list[Any] = []
    previous = None
    for turn in TURNS[name]:
        conversation += [user(turn)] if isinstance(turn, str) else turn
        chained = respond(turn, previous_response_id=previous)
        whole = respond(conversation, store=False)
        assert without_ids(chained) | {"store": False} == without_ids(whole)
        assert chained.previous_response_id == previous
        conversation += [item.model_dump() for item in chained.output]
        previous = chained.id


@pytest.mark.parametrize(
    ("tool", "call", "kind"), [(LOOK, CALL, "function_call"), (SHELL, SHELL_CALL, "custom_tool_call")]
)
def test_calls_and_their_outputs_are_part_of_a_chain(respond, tool, call, kind):
    first = respond(f"SAY <think>hm</think>Well. {call}", tools=[tool])
    *_, called = first.output
    assert called.type == kind
    output = {"type": f"{kind}_output", "call_id": called.call_id, "output": "SAY seen"}
    chained = respond([output], tools=[tool], previous_response_id=first.id)
    conversation = [user(f"SAY <think>hm</think>Well. {call}"), *(item.model_dump() for item in first.output), output]
    assert chained.output_text == "seen"
    assert without_ids(chained) == without_ids(respond(conversation, tools=[tool]))
    third = respond("SAY bye", previous_response_id=chained.id)
    conversation += [*(item.model_dump() for item in chained.output), user("SAY bye")]
    assert without_ids(third) == without_ids(respond(conversation))  # without tools: they are not carried over


def test_the_demo_model_answers_a_chain_as_the_whole_conversation(demo):
    with openai.OpenAI(base_url=demo.openai, api_key="none", timeout=120) as client:
        greedy: dict[str, Any] = {"model": "demo", "temperature": 0, "max_output_tokens": 12}
        first = client.responses.create(input="What is a kernel?", **greedy)
        second = client.responses.create(input="And a shell?", previous_response_id=first.id, **greedy)
        conversation = [user("What is a kernel?"), *(item.model_dump() for item in first.output), user("And a shell?")]
        whole = client.responses.create(input=conversation, **greedy)
    assert without_ids(second) == without_ids(whole)
    assert second.output_text


def test_a_turn_computes_only_its_new_tokens(respond):
    """But for the last block, which is not full."""
    first = respond(f"{'No other test has these words. ' * 20}SAY first")
    second = respond("SAY second", previous_response_id=first.id)
    assert first.usage.input_tokens_details.cached_tokens == 0
    assert second.usage.input_tokens_details.cached_tokens > first.usage.total_tokens - 16


async def test_the_turns_after_the_first_are_a_session(gateway, monkeypatch):
    """For which the service retains the KV between them."""
    sessions, submit = [], Engine.submit

    def note(self, request, *rest, **more):
        sessions.append(request.session_id)
        return submit(self, request, *rest, **more)

    monkeypatch.setattr(Engine, "submit", note)
    previous = None
    for headers in ({}, {}, {}, {"x-session-id": "mine"}, {}):
        body = {"input": "a", "previous_response_id": previous, "max_output_tokens": 1}
        previous = (await gateway.post("/v1/responses", headers=headers, **body)).json()["id"]
    first, second, third, named, last = sessions
    assert (first, named) == ("", "mine")
    assert second == third == last != ""


def test_instructions_are_not_carried_over(respond):
    first = respond("SAY a", instructions="Be brief.")
    second = respond("SAY b", previous_response_id=first.id)
    third = respond("SAY b", previous_response_id=first.id, instructions="Be long-winded.")
    assert (second.instructions, third.instructions) == (None, "Be long-winded.")
    assert third.usage.input_tokens - second.usage.input_tokens == len("system\nBe long-winded.") + 2


def test_tools_among_the_items_are_carried_over(respond):
    added = {"type": "additional_tools", "tools": [LOOK]}
    first = respond([added, user("SAY a")])
    second = respond(f"SAY {CALL}", previous_response_id=first.id)
    assert [item.type for item in second.output] == ["function_call"]


def test_turns_may_branch(respond):
    first = respond("SAY one")
    assert respond("SAY two", previous_response_id=first.id).output_text == "two"
    assert respond("SAY deux", previous_response_id=first.id).output_text == "deux"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_fetched_as_it_was_sent(client, respond, stream):
    response = respond(f"SAY <think>hm</think>Well. {CALL}", tools=[LOOK], metadata={"a": "b"}, stream=stream)
    if stream:
        *_, last = response
        response = last.response
    assert client.responses.retrieve(response.id).model_dump() == response.model_dump()
    assert response.model_extra["store"] is True


def test_a_stored_turn_counts_the_tokens_before_it(client, respond):
    first = respond("SAY one")
    count = client.responses.input_tokens.count(model="gpt-4o", input="SAY two", previous_response_id=first.id)
    assert count.input_tokens == respond("SAY two", previous_response_id=first.id).usage.input_tokens


def test_what_is_deleted_is_not_found(client, respond):
    first = respond("SAY one")
    second = respond("SAY two", previous_response_id=first.id)
    client.responses.delete(first.id)
    check_is_gone(client, first.id)
    # Its items are part of the conversation that goes on.
    assert respond("SAY three", previous_response_id=second.id).usage.input_tokens > second.usage.input_tokens
    client.responses.delete(second.id)
    check_is_gone(client, second.id)


def check_is_gone(client, response_id):
    responses = client.responses
    for call in (responses.retrieve, responses.delete, responses.cancel, responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            call(response_id)
        assert (caught.value.param, caught.value.code) == ("response_id", "response_not_found")
    with pytest.raises(openai.NotFoundError) as caught:
        responses.create(model="gpt-4o", input="SAY a", previous_response_id=response_id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_an_unknown_id_is_not_found(client):
    check_is_gone(client, UNKNOWN)


def test_what_is_not_to_be_stored_is_not_found(client, respond):
    response = respond("SAY a", store=False)
    assert response.model_extra["store"] is False
    check_is_gone(client, response.id)


def test_what_is_not_stored_may_continue_what_is(respond):
    first = respond("SAY one")
    second = respond("SAY two", previous_response_id=first.id, store=False)
    assert second.usage.input_tokens > first.usage.total_tokens


def test_only_a_response_in_the_background_is_cancelled(client, respond):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.cancel(respond("SAY a").id)
    assert "was not made with background: true" in caught.value.message


def test_only_a_stream_in_the_background_is_followed(client, respond):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.retrieve(respond("SAY a").id, stream=True)
    assert "background: true and stream: true" in caught.value.message


def test_the_items_of_an_input_are_listed_in_pages(client, respond):
    first = respond([{"role": "system", "content": "s"}, user("SAY <think>hm</think>so")])
    second = respond("SAY b", previous_response_id=first.id)
    listed = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert listed.has_more
    items = [item.to_dict() for page in listed.iter_pages() for item in page.data]
    assert [item["type"] for item in items] == ["message", "message", "reasoning", "message", "message"]
    assert [item.get("role") for item in items] == ["system", "user", None, "assistant", "user"]
    assert items[2:4] == [item.to_dict() for item in first.output]
    assert items[4]["content"] == [{"type": "input_text", "text": "SAY b"}]
    newest_first = client.responses.input_items.list(second.id)
    assert [item.to_dict() for item in newest_first.data] == items[::-1]
    assert not newest_first.has_more
    assert (newest_first.first_id, newest_first.last_id) == (items[4]["id"], items[0]["id"])
    assert len({item["id"] for item in items}) == 5


@pytest.mark.parametrize(
    ("query", "param"),
    [({"limit": 0}, "limit"), ({"limit": 101}, "limit"), ({"order": "up"}, "order"), ({"after": "msg_x"}, "after")],
)
def test_a_page_that_cannot_be_is_refused(client, respond, query, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_items.list(respond("SAY a").id, **query)
    assert caught.value.param == param


async def test_a_conversation_that_no_longer_fits_is_refused(gateway):
    first = await gateway.post("/v1/responses", input="a" * 3000, max_output_tokens=1)
    second = await gateway.post("/v1/responses", input="a" * 2000, previous_response_id=first.json()["id"])
    assert (second.status_code, second.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_conversation_may_not_have_too_many_items(gateway, monkeypatch):
    monkeypatch.setattr(stored_responses, "MAX_ITEMS", 5)
    first = await gateway.post("/v1/responses", input=[user("a")] * 5, max_output_tokens=1)
    assert first.json()["store"] is True
    second = await gateway.post("/v1/responses", input="a", previous_response_id=first.json()["id"])
    assert (second.status_code, second.json()["error"]["param"]) == (400, "previous_response_id")
    assert "more than 5 items" in second.json()["error"]["message"]


ONE, OTHER = "1" * 40, "2" * 40


async def test_another_tenants_response_is_not_found(start_gateway, load_keys, tmp_path):
    known = [(ONE, "one"), (OTHER, "other")]
    (tmp_path / "keys").write_text(
        "\n".join(f"sha256:{hashlib.sha256(key.encode()).hexdigest()} {tenant}" for key, tenant in known)
    )
    gateway = await start_gateway(service={"authenticator": load_keys(tmp_path / "keys")})
    async with gateway_client(gateway, ONE) as owner, gateway_client(gateway, OTHER) as other:
        response = await owner.responses.create(model="bytes", input="a", max_output_tokens=1)
        responses = other.responses
        for call in (responses.retrieve, responses.delete, responses.cancel, responses.input_items.list):
            with pytest.raises(openai.NotFoundError) as caught:
                await call(response.id)
            with pytest.raises(openai.NotFoundError) as unknown:
                await call(UNKNOWN)
            assert caught.value.message.replace(response.id, UNKNOWN) == unknown.value.message
        with pytest.raises(openai.NotFoundError):
            await responses.create(model="bytes", input="a", previous_response_id=response.id)
        assert (await owner.responses.retrieve(response.id)).id == response.id


def gateway_client(gateway, key="none"):
    return openai.AsyncOpenAI(
        base_url=gateway.base, api_key=key, max_retries=0, timeout=120, http_client=plain_client(gateway.base)
    )


async def test_a_response_that_is_too_old_is_not_found(start_gateway):
    gateway = await start_gateway(responses_ttl_s=0.3)
    first = (await gateway.post("/v1/responses", input="a", max_output_tokens=1)).json()

    assert first["store"] is True
    while (await gateway.http.get(f"/v1/responses/{first['id']}")).status_code == 200:
        pass
    second = await gateway.post("/v1/responses", input="a", previous_response_id=first["id"])
    assert second.status_code == 404


async def test_the_oldest_responses_give_way(start_gateway):
    gateway = await start_gateway(max_responses_bytes=40_000)
    ids = []
    for _ in range(12):
        response = await gateway.post("/v1/responses", input="a" * 1000, max_output_tokens=1)
        assert response.json()["store"] is True
        ids.append(response.json()["id"])
    found = [(await gateway.http.get(f"/v1/responses/{each}")).status_code for each in ids]
    assert found == sorted(found, reverse=True)
    assert {found[0], found[-1]} == {404, 200}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_does_not_fit_is_not_stored_and_says_so(start_gateway, stream):
    gateway = await start_gateway(max_responses_bytes=6000)
    async with gateway_client(gateway) as client:
        response = await client.responses.create(model="bytes", input="a" * 2000, max_output_tokens=1, stream=stream)
        if stream:
            response = [event async for event in response][-1].response
        assert response.model_extra["store"] is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)


async def test_a_gateway_may_store_nothing(start_gateway):
    gateway = await start_gateway(responses_ttl_s=0)
    response = await gateway.post("/v1/responses", input="a", store=True, max_output_tokens=1)
    assert response.json()["store"] is False
    refused = await gateway.post("/v1/responses", input="a", background=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
    assert "this gateway stores nothing" in refused.json()["error"]["message"]

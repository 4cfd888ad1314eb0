"""The ``anthropic`` package against a gateway whose model writes a given text: tools, thinking, streams, errors."""

import hashlib
import json
import time
from typing import Any

import anthropic
import httpx
import pytest

from penstock.clients.gateway.requests.messages import as_chat
from penstock.clients.gateway.responses.chat_stream import Part
from penstock.clients.gateway.responses.message_events import MessageEvents, WholeMessage
from penstock.clients.gateway.schemas.messages import MessagesRequest
from penstock.clients.output import ToolCallPart

SAID = "Ein Käfer, 東京 and 🙂."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
TOOLS = [
    {
        "name": name,
        "description": f"Tells the {name}.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    for name in ("weather", "time")
]
ANSWERS = {
    "text": (SAID, [("text", SAID)], "end_turn"),
    "a call": (CALL, [("weather", {"city": "Köln"})], "tool_use"),
    "text and two calls": (
        f"I look.{CALL}{OTHER_CALL}",
        [("text", "I look."), ("weather", {"city": "Köln"}), ("time", {})],
        "tool_use",
    ),
    "reasoning": (f"<think>Well.</think>{SAID}", [("thinking", "Well."), ("text", SAID)], "end_turn"),
    "reasoning and a call": (
        f"<think>So.</think>{CALL}",
        [("thinking", "So."), ("weather", {"city": "Köln"})],
        "tool_use",
    ),
    "text that only looks like a call": ("a <tool_cat>", [("text", "a <tool_cat>")], "end_turn"),
}


@pytest.fixture(scope="module")
def client(scripted):
    with anthropic.Anthropic(base_url=scripted, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def body(said, **options):
    return {
        "model": "gpt-4o", "max_tokens": 400, "messages": [{"role": "user", "content": f"SAY {said}"}], **options
    }  # fmt: skip


def blocks(message):
    return [
        (block.name, block.input) if block.type == "tool_use" else (block.type, getattr(block, block.type))
        for block in message.content
    ]


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_the_same_whole_and_streamed(name, client):
    said, content, reason = ANSWERS[name]
    message = client.messages.create(**body(said, tools=TOOLS))
    assert (blocks(message), message.stop_reason, message.role) == (content, reason, "assistant")
    assert message.usage.output_tokens > 0
    # The package itself combines the parts.
    with client.messages.stream(**body(said, tools=TOOLS)) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert (blocks(streamed), streamed.stop_reason) == (content, reason)
    assert streamed.usage.output_tokens == message.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert len(kinds) > 6


def test_the_first_event_has_the_tokens_of_the_prompt(client):
    with client.messages.stream(**body(SAID)) as stream:
        first = next(iter(stream))
        usage = stream.get_final_message().usage
    counted = client.messages.count_tokens(**{k: v for k, v in body(SAID).items() if k != "max_tokens"})
    for each in (first.message.usage, usage):
        assert each.input_tokens + each.cache_read_input_tokens == counted.input_tokens > 0


def test_results_go_back_with_the_reasoning_before_the_call(client):
    request = body(f"<think>So.</think>{CALL}", tools=TOOLS)
    message = client.messages.create(**request)
    result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": [{"type": "text", "text": "21"}]}
    said = {"type": "text", "text": f"SAY {SAID}"}
    messages = [*request["messages"], {"role": "assistant", "content": message.content}]
    messages.append({"role": "user", "content": [result, said]})
    answer = client.messages.create(**request | {"messages": messages})
    assert blocks(answer) == [("text", SAID)]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"a": [1.5, 123456789012345678901]}', {"a": [1.5, 123456789012345678901]}),
        ('{"a": 1, "b": "x', {"a": 1}),
        ("{'a': 1}", {}),
        ("[1]", {}),
        ("", {}),
    ],
)
def test_the_input_of_a_call_is_an_object_whole_and_streamed(arguments, given):
    events, whole = MessageEvents(), WholeMessage()
    halves = arguments[:4], arguments[4:]
    calls = [ToolCallPart(0, "id", "f", halves[0]), ToolCallPart(0, arguments=halves[1])]
    written = events.begin({}) + events.add_part(Part(0, "", calls=calls)) + events.end({})
    assert "".join(each["delta"].get("partial_json", "") for each in written if "delta" in each) == json.dumps(
        given, separators=(",", ":")
    )
    for event in written:
        whole.add_chunk(event)
    assert whole.result()["content"] == [{"type": "tool_use", "id": "id", "name": "f", "input": given}]


def test_an_output_that_breaks_off(client):
    message = client.messages.create(**body(CALL, tools=TOOLS, max_tokens=60))
    assert message.stop_reason == "max_tokens"
    assert [name for name, _ in blocks(message)] == ["weather"]
    message = client.messages.create(**body(SAID, max_tokens=3))
    assert (blocks(message), message.stop_reason) == ([("text", SAID[:3])], "max_tokens")


def test_a_stop_sequence_ends_an_answer(client):
    message = client.messages.create(**body(SAID, stop_sequences=["Käfer", "x"]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Käfer")
    assert blocks(message) == [("text", "Ein ")]


def test_the_last_message_of_the_assistant_is_continued(client):
    messages = [*body(SAID)["messages"], {"role": "assistant", "content": SAID[:4]}]
    message = client.messages.create(**body(SAID) | {"messages": messages})
    assert message.content


def test_instructions_are_one_message_and_without_the_billing_header(client, scripted):
    def count(**fields):
        given = body("x", **fields)
        del given["max_tokens"]
        return client.messages.count_tokens(**given).input_tokens

    text = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    billing = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=8f2;"}]
    assert count(system=billing + text) == count(system="Be brief.") > count()


async def test_the_asynchronous_client(scripted):
    async with (
        anthropic.AsyncAnthropic(base_url=scripted, api_key="none", max_retries=0) as client,
        client.messages.stream(**body(SAID)) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == SAID


BAD = {
    "a wrong value": ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError, "temperature"),
    "no limit": ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
    "no messages": ({"messages": []}, anthropic.BadRequestError, "messages: must not be empty"),
    "another model": ({"model": "nobody"}, anthropic.NotFoundError, "model"),
    "an unknown field": ({"extra_body": {"nonsense": 1}}, anthropic.BadRequestError, "nonsense: unknown field"),
    "a container": ({"extra_body": {"container": "c"}}, anthropic.BadRequestError, "container: is not supported"),
    "a hosted tool": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        anthropic.BadRequestError,
        "tools[0]: type 'web_search_20250305' is not supported",
    ),
    "an invalid schema": (
        {"tools": [{"name": "f", "input_schema": {"type": 7}}], "tool_choice": {"type": "any"}},
        anthropic.BadRequestError,
        "tools[0].input_schema",
    ),
    "a choice without a name": (
        {"tools": TOOLS, "tool_choice": {"type": "tool"}},
        anthropic.BadRequestError,
        "tool_choice.name",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        anthropic.BadRequestError,
        "messages[0].content[0]: not a supported block",
    ),
    "a result in the assistant's message": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "", "content": "x"}]}]},
        anthropic.BadRequestError,
        "messages[0].content[0].type: tool_result is only for messages of the user",
    ),
    "no message but instructions": (
        {"messages": [{"role": "system", "content": []}]},
        anthropic.BadRequestError,
        "messages: must have a message of the user",
    ),
    "a first message of the system with a call": (
        {"messages": [{"role": "system", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
        anthropic.BadRequestError,
        "messages[0].content[0].type: must be text",
    ),
    "a later message of the system with a result": (
        {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "system", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]},
            ]
        },
        anthropic.BadRequestError,
        "messages[1].content[0].type: must be text",
    ),
    "a call to continue": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
        anthropic.BadRequestError,
        "messages: the last message must be",
    ),
    "reasoning to continue": (
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": ""}]}]},
        anthropic.BadRequestError,
        "messages: the last message must be",
    ),
    "a prompt that is too long": (
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        anthropic.BadRequestError,
        "messages",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_an_error_has_the_format_of_the_api(name, client):
    changes, kind, text = BAD[name]
    with pytest.raises(kind) as caught:
        client.messages.create(**body("x") | changes)
    shown: Any = caught.value.body
    error = shown["error"]
    assert caught.value.request_id == caught.value.response.headers["x-request-id"]
    assert text in error["message"]
    assert shown["type"] == "error"
    assert error["type"] == ("not_found_error" if kind is anthropic.NotFoundError else "invalid_request_error")


async def test_keys_are_in_the_header_of_anthropics_clients(start_gateway, say, load_keys, tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"sha256:{hashlib.sha256(b'of-one').hexdigest()} one\n")
    gateway = await start_gateway(say, service={"authenticator": load_keys(path)})
    base = str(gateway.http.base_url)
    request = body(SAID, model="bytes")
    async with anthropic.AsyncAnthropic(base_url=base, api_key="of-one", max_retries=0) as client:
        assert blocks(await client.messages.create(**request)) == [("text", SAID)]
    async with anthropic.AsyncAnthropic(base_url=base, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(**request)
        shown: Any = caught.value.body
        assert shown["error"]["type"] == "authentication_error"
    headers = {"x-api-key": "of-one", "authorization": "Bearer of-two"}
    assert (await gateway.post("/v1/messages", headers=headers, **request)).status_code == 401
    headers = {"x-api-key": "", "authorization": "Bearer of-one"}
    assert (await gateway.post("/v1/messages", headers=headers, **request)).status_code == 200


@pytest.mark.parametrize(
    ("kind", "variables"),
    [
        ("enabled", {"enable_thinking": True}),
        ("adaptive", {"enable_thinking": True}),
        ("between_tools", {"enable_thinking": True}),
        ("disabled", {"enable_thinking": False}),
        (None, None),
    ],
)
def test_thinking_is_a_variable_of_the_template(kind, variables):
    thinking = {} if kind is None else {"thinking": {"type": kind}}
    assert as_chat(MessagesRequest.model_validate(body("x", **thinking))).chat.chat_template_kwargs == variables


def test_the_budget_of_thinking_is_that_of_chats():
    request = body("x", thinking={"type": "enabled", "budget_tokens": 4})
    assert as_chat(MessagesRequest.model_validate(request)).chat.thinking_token_budget == 4


def test_names_of_options_are_those_of_the_request():
    names = as_chat(MessagesRequest.model_validate(body("x"))).names
    for field, name in (
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("response_format", "output_config.format.schema"),
        ("chat.parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    ):
        assert names.caller_name(field) == name


def test_empty_instructions_are_none():
    """A template may have default ones, which an empty message would replace."""
    messages = [{"role": "system", "content": ""}, *body("x")["messages"], {"role": "system", "content": ""}]
    given = body("x", system="") | {"messages": messages}
    (message,) = as_chat(MessagesRequest.model_validate(given)).chat.messages
    assert message.role == "user"


def test_texts_of_the_user_that_follow_each_other_are_one_message():
    given = ["a", [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]]
    messages = [{"role": "user", "content": content} for content in given]
    request = body("x") | {"messages": [*messages, {"role": "assistant", "content": "d"}, *messages]}
    chat = as_chat(MessagesRequest.model_validate(request)).chat
    assert [message.content for message in chat.messages] == ["a\nb\nc", "d", "a\nb\nc"]


def test_many_messages_of_the_user_are_joined_in_linear_time():
    messages = [{"role": "user", "content": "x" * 4000}] * 4096
    request = MessagesRequest.model_validate(body("x") | {"messages": messages})
    begin = time.process_time()
    (message,) = as_chat(request).chat.messages
    assert time.process_time() - begin < 2
    assert message.content == "\n".join(["x" * 4000] * 4096)


def test_events_are_named(scripted):
    with httpx.stream("POST", f"{scripted}/v1/messages", json=body(SAID, stream=True), timeout=120) as response:
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [each["type"] for each in data]

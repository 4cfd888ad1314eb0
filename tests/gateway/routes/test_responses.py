"""POST /v1/responses, by the openai package: whole, streamed, with tools and reasoning; what is refused.

The model says what the prompt tells it to after SAY, a byte a token.
"""

import json
from typing import Any

import httpx
import openai
import pytest

from penstock.clients.events import Delta, merge
from penstock.clients.gateway.responses.chat_stream import Part
from penstock.clients.gateway.responses.response_events import ResponseEvents
from penstock.clients.output import ToolCallPart

LOOK = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'


FETCHED = {"type": "function_call_output", "call_id": "c"}


@pytest.fixture
def client(scripted):
    with openai.OpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def respond(client):
    """Asks; whole unless it is told to stream, then all events."""

    def respond(given, **options):
        answer = client.responses.create(model="gpt-4o", input=given, **options)
        return list(answer) if options.get("stream") else answer

    return respond


def prompt_of(response):
    """How many tokens of a prompt were paid for."""
    return response.usage.input_tokens


def timeless(response):
    """What two answers to one question share."""
    found = response.model_dump(exclude={"id": True, "created_at": True, "completed_at": True})
    found["usage"].pop("input_tokens_details")  # the second finds the first one's prefix
    for item in found["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return found


def test_a_question_gets_its_answer(respond):
    """No other test has the word, so that nothing of it is cached."""
    response = respond("SAY welcome", metadata={"a": "b"}, user="me", temperature=0.5)
    assert response.output_text == "welcome"
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (response.object, response.status, response.model) == ("response", "completed", "gpt-4o")
    assert response.id.startswith("resp_")
    assert message.id.startswith("msg_")
    assert (response.metadata, response.user, response.temperature) == ({"a": "b"}, "me", 0.5)
    assert (response.error, response.incomplete_details, response.previous_response_id) == (None, None, None)
    assert response.model_extra["store"] is True
    assert response.text.format.type == "text"
    usage = response.usage
    assert usage.input_tokens == len("user\nSAY welcomeassistant\n") + 3
    assert usage.output_tokens == len("welcome") + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)


def test_an_answer_that_reaches_its_limit_is_incomplete(respond):
    response = respond("SAY hello", max_output_tokens=3)
    assert (response.output_text, response.status) == ("hel", "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.max_output_tokens == 3
    assert response.output[0].status == "incomplete"


def test_an_answer_of_nothing_is_an_empty_message(respond):
    response = respond("SAY ")
    assert (response.output_text, response.status, len(response.output)) == ("", "completed", 1)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("SAY héllo, world", {}),
    "cut": ("SAY hello", {"max_output_tokens": 2}),
    "stopped": ("SAY one two three", {"extra_body": {"stop": " three"}}),
    "nothing": ("SAY ", {}),
    "logprobs": ("SAY hé", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    "call": (f"SAY {CALL}", {"tools": [LOOK]}),
    "text and calls": (f"SAY Well. {CALL}\n{CALL}", {"tools": [LOOK]}),
    # So long that what comes whole was put together from several tokens at once.
    "text around calls": (f"SAY Well. {CALL}\nThen. {CALL}\nSo.", {"tools": [LOOK]}),
    "one call": (f"SAY {CALL}\n{CALL}", {"tools": [LOOK], "parallel_tool_calls": False}),
    "reasoning": ("SAY <think>hm</think>so", {}),
    "reasoning, cut": ("SAY <think>hm, well</think>so", {"max_output_tokens": 10}),
    "reasoning and call": (f"SAY <think>hm</think>\n{CALL}", {"tools": [LOOK]}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_streamed_is_what_is_sent_whole(respond, case):
    question, options = CASES[case]
    whole = respond(question, **options)
    events = respond(question, stream=True, **options)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    streamed = events[-1].response
    assert timeless(streamed) == timeless(whole)
    assert {event.response.id for event in events if hasattr(event, "response")} == {streamed.id}
    for index, item in enumerate(streamed.output):
        of_item = [event for event in events if getattr(event, "output_index", None) == index]
        assert of_item[0].type == "response.output_item.added"
        assert of_item[0].item.status == "in_progress"
        assert of_item[-1].type == "response.output_item.done"
        assert of_item[-1].item == item
        assert {event.item_id for event in of_item[1:-1]} == {item.id}
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(event.delta for event in of_item if event.type.endswith(".delta")) == text


@pytest.mark.parametrize("case", CASES)
def test_logprobs_cover_only_messages_streamed_or_whole(respond, case):
    """Each message has those of its own text: none of reasoning, of calls, or of the marks around them."""
    question, options = CASES[case]
    options = options | {"include": ["message.output_text.logprobs"]}
    whole = respond(question, **options)
    events = respond(question, stream=True, **options)
    for index, item in enumerate(whole.output):
        deltas = [
            event for event in events if getattr(event, "output_index", None) == index and hasattr(event, "delta")
        ]
        told = [entry.model_dump() for event in deltas for entry in getattr(event, "logprobs", ())]
        if item.type != "message":
            assert told == []
            continue
        (part,) = item.content
        assert [entry.model_dump(include={"token", "logprob", "top_logprobs"}) for entry in part.logprobs] == [
            {name: entry[name] for name in ("token", "logprob", "top_logprobs")} for entry in told
        ]
        assert b"".join(bytes(entry.bytes) for entry in part.logprobs) == part.text.encode()
        for event in deltas:
            assert b"".join(bytes(entry.bytes) for entry in event.logprobs) == event.delta.encode()


def test_text_comes_in_typed_events(respond):
    events = respond("SAY hello", stream=True)
    kinds = [event.type.removeprefix("response.") for event in events]
    kinds = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert next(event.text for event in events if event.type == "response.output_text.done") == "hello"


def test_the_openai_packages_own_accumulator_agrees(client):
    with client.responses.stream(model="gpt-4o", input=f"SAY Well. {CALL}", tools=[LOOK]) as stream:
        for _ in stream:
            pass
        response = stream.get_final_response()
    assert response.output_text == "Well."
    assert json.loads(response.output[1].arguments) == {"at": "it"}


def test_a_call_and_its_output_go_back(respond, client):
    first = respond(f"SAY {CALL}", tools=[LOOK])
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look", {"at": "it"})
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "SAY seen"}
    question = {"role": "user", "content": f"SAY {CALL}"}
    assert respond([question, *first.output, output], tools=[LOOK]).output_text == "seen"


def test_instructions_come_first(respond):
    plain = respond("SAY a")
    instructed = respond("SAY a", instructions="Be brief.")
    assert prompt_of(instructed) - prompt_of(plain) == len("system\nBe brief.") + 2
    assert instructed.instructions == "Be brief."


def test_instructions_at_the_beginning_are_one_message(respond, client):
    """Chat templates may refuse a second one. Later ones stay where they are."""
    developer = {"role": "developer", "content": "c"}
    later = [{"role": "user", "content": "q"}, developer, {"role": "user", "content": "SAY d"}]
    response = respond([{"role": "system", "content": "b"}, developer, *later], instructions="a")
    assert response.output_text == "d"
    messages: list[Any] = [{"role": "system", "content": "a\n\nb\n\nc"}, *later]
    assert prompt_of(response) == client.chat.completions.create(model="gpt-4o", messages=messages).usage.prompt_tokens


def test_items_are_the_messages_of_a_chat(respond, client):
    items = [
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be"}, {"type": "input_text", "text": "brief."}],
        },
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "a", "annotations": []}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "SAY b"}]},
    ]
    messages = [
        {"role": "developer", "content": "Be\nbrief."},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "SAY b"},
    ]
    response = respond(items)
    assert response.output_text == "b"
    chat = client.chat.completions.create(model="gpt-4o", messages=messages)
    assert prompt_of(response) == chat.usage.prompt_tokens


def test_reasoning_is_an_item_of_its_own_and_is_counted(respond):
    response = respond("SAY <think>hm</think>so", reasoning={"effort": "low", "summary": "auto"})
    reasoning, message = response.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "hm", [])
    assert message.content[0].text == "so"
    assert response.usage.output_tokens_details.reasoning_tokens == len("hm")
    assert response.reasoning.effort == "low"


def test_log_probabilities_are_those_of_the_text(respond):
    response = respond("SAY hi", include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = response.output[0].content[0].logprobs
    assert [entry.token for entry in logprobs][:2] == ["h", "i"]
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
    assert respond("SAY hi").output[0].content[0].logprobs == []


def test_an_interrupted_answer_is_reported_as_failed_and_keeps_its_partial_output():
    events = ResponseEvents({"id": "resp_1", "model": "m"})
    told = events.begin_response() + events.add_part(Part(0, "hel")) + events.fail("server_error", "it broke")
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert told[-1]["type"] == "response.failed"
    response = told[-1]["response"]
    assert (response["status"], response["error"]) == ("failed", {"code": "server_error", "message": "it broke"})
    (message,) = response["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "hel")
    assert told[0]["response"]["output"] == []


@pytest.mark.parametrize(("rest", "texts"), [("", []), ("]} oh", ["]} oh"])])
def test_a_call_that_the_model_breaks_off_is_incomplete(respond, rest, texts):
    response = respond(f'SAY <tool_call>{{"name": "look", "arguments": {{"at": "it"{rest}', tools=[LOOK])
    call, *messages = response.output
    assert (call.arguments, call.status, response.status) == ('{"at": "it"', "incomplete", "completed")
    assert [message.content[0].text for message in messages] == texts


def test_text_after_a_call_that_comes_with_the_calls_end_comes_after_it():
    events = ResponseEvents({"id": "resp_1"})
    told = events.add_part(Part(0, "", calls=[ToolCallPart(0, "call_a", "look", "{")]))
    calls = [ToolCallPart(0, arguments="}"), ToolCallPart(1, "call_b", "go", "{}", text_offset=4)]
    told += events.add_part(Part(0, "then", calls=calls))
    told += events.end({}, is_cut=False)
    first, text, second = told[-1]["response"]["output"]
    assert (first["call_id"], first["name"], first["arguments"]) == ("call_a", "look", "{}")
    assert text["content"][0]["text"] == "then"
    assert (second["call_id"], second["arguments"], second["status"]) == ("call_b", "{}", "completed")


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({"conversation": "conv_1"}, "conversation", "previous_response_id, or send the whole conversation as input"),
        ({"background": True, "store": False}, "background", "not with store: false"),
        ({"prompt": {"id": "p"}}, "prompt", "send instructions and input"),
        ({"truncation": "auto"}, "truncation", "shorten it"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "must be text, json_object or json_schema"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [{"type": "hammer"}]}, "tools[0].type", "'function', 'custom' or 'namespace'"),
        ({"include": ["everything"]}, "include[0]", "message.output_text.logprobs"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "send the item itself"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "must be message, function_call"),
        ({"input": [FETCHED | {"output": [{"type": "input_image"}]}]}, "input[0].output[0]", "must be text:"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "must be text:"),
        ({"input": [{"role": "user", "content": [{"type": ["text"]}]}]}, "input[0].content[0]", "must be text:"),
        ({"input": [{"role": "user", "content": ["text"]}]}, "input[0].content[0]", "must be text:"),
        ({"input": [{"role": "user", "content": [{"type": "text"}]}]}, "input[0].content[0].text", "Field required"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": None}, "input", "valid"),
        ({"n": 2}, "n", "unknown field"),
        ({"max_output_tokens": "5"}, "max_output_tokens", "integer"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"temperature": -1}, "temperature", "0"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused_by_name(scripted, body, param, why, stream):
    answer = httpx.post(f"{scripted}/v1/responses", json={"input": "SAY a", "stream": stream} | body, timeout=120)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert why in error["message"]


def test_what_changes_nothing_is_accepted(respond):
    response = respond(
        "SAY a",
        store=False,
        background=False,
        truncation="disabled",
        service_tier="auto",
        prompt_cache_key="k",
        include=["reasoning.encrypted_content", "web_search_call.results"],
        extra_body={"client_metadata": {"a": "b"}},
        max_tool_calls=3,
        stream_options={"include_obfuscation": False},
        stream=True,
    )
    assert response[-1].response.output_text == "a"
    assert response[-1].response.model_extra["store"] is False


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="a")


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_text_is_refused_before_anything_is_sent(scripted, stream):
    body = json.dumps({"input": "SAY a", "metadata": {"a": "\ud800"}, "stream": stream})
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{scripted}/v1/responses", content=body, headers=headers, timeout=120)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_unicode")


def test_text_between_calls_stays_between_them_however_much_comes_at_once(respond):
    response = respond(f"SAY Well. {CALL}\nThen. {CALL}\nSo.", tools=[LOOK])
    shown = [item.name if item.type == "function_call" else item.content[0].text for item in response.output]
    assert shown == ["Well.", "look", "Then.", "look", "So."]


def test_calls_know_the_text_before_them_when_parts_are_put_together():
    first = Delta("ab", [], tool_calls=[ToolCallPart(0, "x", "f", "{", text_offset=1)])
    second = Delta("c", [], tool_calls=[ToolCallPart(0, arguments="}"), ToolCallPart(1, "y", "g", "{}", text_offset=3)])
    (whole,) = merge([first, second])
    assert isinstance(whole, Delta)
    assert (whole.text, [(call.arguments, call.text_offset) for call in whole.tool_calls]) == (
        "abc",
        [("{}", 1), ("{}", 3)],
    )

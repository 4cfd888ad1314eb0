"""What of a chat's fields, and of the JSON in them, is refused before a template sees it."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

import penstock.v1 as pb
from penstock.service.chat_templates.chat_template import compile_templates
from penstock.service.config.field_rules import ModelLimits
from penstock.service.config.limits import Validator
from penstock.service.config.text_size import MAX_TEXT_BYTES
from penstock.service.errors import Reason, ServiceError
from penstock.service.requests.chat import MAX_JSON_DEPTH, check_chat, parse_chat

QUESTION = pb.ChatMessage(role="user", content="Is it raining in Köln?")
ANSWER = pb.ChatMessage(role="assistant", content="Yes")
CALL = pb.ChatMessage(role="assistant", content="x", tool_calls=[pb.ToolCall(name="get_weather")])


TEMPLATE = compile_templates({"default": "{{ tools }}{{ messages }}"}, {})["default"]


def checked(chat):
    check_chat(chat, TEMPLATE)
    return parse_chat(chat)


def refusal(chat):
    with pytest.raises(ServiceError) as error:
        checked(chat)
    return error.value


def tool(parameters):
    return pb.Tool(function=pb.FunctionTool(name="f", parameters_json=parameters))


TOOL = tool("{}")


def nested(depth):
    return '{"a": ' * depth + "1" + "}" * depth


NO_OBJECTS = ["{", "[1]", '"text"', "null", "{'a': 1}", '{"a": NaN}', '{"a": Infinity}', '{"a": "\\ud800"}'] + [
    '{"a": ' + inner + "}" for inner in ("9" * 5000, nested(MAX_JSON_DEPTH), nested(100_000), "[" * 100_000)
]
no_object = pytest.mark.parametrize("text", NO_OBJECTS, ids=range(12))


@no_object
def test_what_is_no_object_of_json_is_refused_by_name(text):
    user = pb.ChatMessage(role="user")
    for chat, field in (
        (pb.Chat(messages=[user], tools=[TOOL, tool(text)]), "chat.tools[1].function.parameters_json"),
        (pb.Chat(messages=[user], template_variables_json=text), "chat.template_variables_json"),
    ):
        error = refusal(chat)
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, field)
        assert len(error.message) < 120


@no_object
def test_arguments_that_are_no_object_are_the_text_that_they_are(text):
    calls = [pb.ToolCall(name="x", arguments_json='{"a": 1}'), pb.ToolCall(name="x", arguments_json=text)]
    chat = pb.Chat(messages=[QUESTION, pb.ChatMessage(role="assistant", tool_calls=calls)])
    assert checked(chat).messages[1].tool_calls == [("", "x", {"a": 1}), ("", "x", text)]


def test_what_is_nested_as_deep_as_may_be_is_taken():
    parsed = parse_chat(pb.Chat(messages=[pb.ChatMessage(role="user")], tools=[tool(nested(MAX_JSON_DEPTH))]))
    assert json.dumps(parsed.tools[0]["function"]["parameters"]) == nested(MAX_JSON_DEPTH)


def test_arguments_may_be_left_out():
    call = pb.ToolCall(name="x")
    assert parse_chat(pb.Chat(messages=[pb.ChatMessage(role="assistant", tool_calls=[call])])).messages[
        0
    ].tool_calls == [("", "x", {})]


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "continue_final_message"])
def test_a_variable_that_has_a_field_is_refused(name):
    error = refusal(pb.Chat(messages=[QUESTION], template_variables_json=json.dumps({name: True})))
    assert (error.reason, error.field) == (Reason.INVALID_FIELD, "chat.template_variables_json")
    assert name in error.message


@pytest.mark.parametrize(
    "chat",
    [
        pb.Chat(messages=[QUESTION, ANSWER], continue_final_message=True, add_generation_prompt=True),
        pb.Chat(messages=[QUESTION], continue_final_message=True),
        pb.Chat(messages=[QUESTION, pb.ChatMessage(role="assistant")], continue_final_message=True),
        pb.Chat(messages=[QUESTION, CALL], continue_final_message=True),
    ],
    ids=["opens a turn", "a question", "empty", "calls"],
)
def test_a_message_that_cannot_be_open_is_refused(chat):
    error = refusal(chat)
    assert (error.reason, error.field) == (Reason.INVALID_FIELD, "chat.continue_final_message")


def test_tools_and_messages_are_bounded_together():
    chat = pb.Chat(
        messages=[pb.ChatMessage(role="user", content="x" * (MAX_TEXT_BYTES - 10))], tools=[tool("{}" + " " * 9)]
    )
    error = refusal(chat)
    assert (error.reason, error.field) == (Reason.INVALID_FIELD, "chat.tools")


async def test_the_loop_turns_while_a_long_text_is_parsed():
    """One call of json's code in C would hold Python's lock throughout: then the loop could not turn at all."""
    chat = pb.Chat(messages=[QUESTION], tools=[tool('{"a": [' + "[]," * (MAX_TEXT_BYTES // 3 - 10))])
    with ThreadPoolExecutor(1) as thread:
        refused = asyncio.get_running_loop().run_in_executor(thread, refusal, chat)
        turns = 0
        while not refused.done():
            await asyncio.sleep(0.001)
            turns += 1
    assert (await refused).field == "chat.tools[0].function.parameters_json"
    assert turns > 10


@pytest.mark.parametrize(
    "text",
    ['{"a": NaN}', '{"a": "\\ud800"}', "[1]", "{'a': 1}", '{"a": "\n"}', "[" * 100_000, nested(MAX_JSON_DEPTH + 1)],
    ids=range(7),
)
def test_a_long_text_is_held_to_the_same_rules_as_a_short_one(text):
    long = text + " " * (1 << 16)
    messages = [refusal(pb.Chat(messages=[QUESTION], tools=[tool(each)])).message for each in (text, long)]
    assert messages[0] == messages[1]


def test_a_long_text_is_parsed_as_a_short_one():
    value = {"a": [1, -2.5e3, True, None, {"b": "ä 🙂 \\"}], "long": "x" * (1 << 16)}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert parse_chat(pb.Chat(messages=[QUESTION], tools=[tool(text)])).tools[0]["function"]["parameters"] == value


def parts(*texts):
    return [pb.ContentPart(text=text) for text in texts]


def test_the_texts_of_parts_are_lines_of_one_content():
    messages = [
        pb.ChatMessage(role="user", content_parts=parts("one", "", "two")),
        pb.ChatMessage(role="assistant", content_parts=parts("three"), tool_calls=[pb.ToolCall(name="f")]),
        pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f")]),
    ]
    contents = [message.content for message in checked(pb.Chat(messages=messages)).messages]
    assert contents == ["one\n\ntwo", "three", None]
    opened = pb.Chat(messages=[QUESTION, pb.ChatMessage(role="assistant", content_parts=parts("Y", "es"))])
    opened.continue_final_message = True
    assert checked(opened).messages[-1].content == "Y\nes"


def test_parts_are_refused_by_name():
    field = "chat.messages[1].content_parts"
    for message, place in (
        (pb.ChatMessage(role="user", content="", content_parts=parts("x")), field),
        (pb.ChatMessage(role="user", content_parts=[*parts("x"), pb.ContentPart()]), f"{field}[1]"),
    ):
        error = refusal(pb.Chat(messages=[QUESTION, message]))
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, place)
    for name in ("image", "audio"):
        part = pb.ContentPart()
        getattr(part, name).CopyFrom(pb.MediaContent(mime_type="x/y", data=b"x"))
        chat = pb.Chat(messages=[QUESTION, pb.ChatMessage(role="user", content_parts=[*parts("x"), part])])
        with pytest.raises(ServiceError) as refused:
            Validator(ModelLimits(258, 4096)).check(pb.GenerationStart(chat=chat))
        assert refused.value.field == f"{field}[1].{name}"
        assert "send text" in refused.value.message


def test_a_template_gets_a_tool_as_openais_clients_send_it():
    schema = {"type": "object", "properties": {"z": {"type": "string"}, "a": {}}, "required": ["z"]}
    weather = pb.FunctionTool(name="weather", description="", parameters_json=json.dumps(schema))
    chat = pb.Chat(messages=[QUESTION], tools=[pb.Tool(function=each) for each in (weather, pb.FunctionTool(name="f"))])
    assert json.dumps(checked(chat).tools) == json.dumps(
        [
            {"type": "function", "function": {"name": "weather", "description": "", "parameters": schema}},
            {"type": "function", "function": {"name": "f"}},
        ]
    )

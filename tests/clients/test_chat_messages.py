"""Conversations as OpenAI's clients have them become the contract's messages, or an error that names the place."""

import json
from typing import Any

import pytest

import penstock.v1 as pb
from penstock.clients import InvalidOption
from penstock.clients.chat_messages import CHAT_OPTION_NAMES, build_chat
from penstock.clients.requests import build_start, start_from_line

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Looks.", "parameters": {"type": "object"}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
MESSAGES: list[Any] = [
    {"role": "user", "content": "Is it raining?", "name": "Ann"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "yes"},
]


def test_the_options_are_the_contracts_fields():
    names = {field.name.removesuffix("_json") for field in pb.Chat.DESCRIPTOR.fields}
    assert names == CHAT_OPTION_NAMES | {"messages"}


def test_every_part_of_a_conversation_reaches_its_field():
    options: Any = {
        "tools": [TOOL, json.dumps(TOOL)],
        "template_variables": {"enable_thinking": False, "of": "é"},
        "add_generation_prompt": False,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "continue_final_message": None,
    }
    chat = build_chat(MESSAGES, options)
    user, assistant, tool = chat.messages
    assert (user.role, user.content, user.name) == ("user", "Is it raining?", "Ann")
    assert (assistant.content, list(assistant.tool_calls)) == (
        "",
        [pb.ToolCall(id="c1", name="weather", arguments_json='{"city": "Köln"}')],
    )
    assert (tool.role, tool.content, tool.tool_call_id) == ("tool", "yes", "c1")
    weather = pb.FunctionTool(name="weather", description="Looks.", parameters_json='{"type": "object"}')
    assert list(chat.tools) == [pb.Tool(function=weather)] * 2
    assert chat.template_variables_json == '{"enable_thinking": false, "of": "é"}'
    assert chat.tool_choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED
    assert chat.HasField("parallel_tool_calls")
    named: Any = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    assert build_chat(MESSAGES, named).tool_choice == pb.ToolChoice(function="weather")
    assert chat.HasField("add_generation_prompt")
    assert not chat.add_generation_prompt
    assert not chat.continue_final_message


def test_a_request_and_a_line_of_a_file_take_them_too():
    options: Any = {"tools": [TOOL], "continue_final_message": True}
    chat = build_chat(MESSAGES, options)
    assert build_start(MESSAGES, options).chat == chat
    assert start_from_line({"id": "1", "messages": MESSAGES, **options}, {}).chat == chat


def test_arguments_may_be_an_object_or_nothing():
    calls: Any = [{"function": {"name": "f", "arguments": {"a": [None]}}}, {"function": {"name": "g"}}]
    [message] = build_chat([{"role": "assistant", "tool_calls": calls}]).messages
    assert [call.arguments_json for call in message.tool_calls] == ['{"a": [null]}', "{}"]


def assistant(*calls, **fields):
    return [{"role": "assistant", "tool_calls": list(calls), **fields}]


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([{"role": "user"}], {}, "messages[0]: expected an object with role and content, got {'role': 'user'}"),
        ([{"role": "assistant", "tool_calls": []}], {}, "messages[0].content: expected text, got None"),
        ([{"role": "user", "content": None}], {}, "messages[0].content: expected text, got None"),
        ([{"role": "user", "content": "x", "names": 1}], {}, "messages[0].names: unknown field"),
        ([{"role": "user", "content": "x", "name": 1}], {}, "messages[0].name: expected text, got 1"),
        ([{"role": "user", "content": "\ud800"}], {}, "messages[0]: "),
        ([{"role": "assistant", "tool_calls": "f"}], {}, "messages[0].tool_calls: expected a list of calls, got 'f'"),
        (assistant("f"), {}, "messages[0].tool_calls[0]: expected an object with a function, got 'f'"),
        (
            assistant(CALL, CALL | {"type": "custom"}),
            {},
            "messages[0].tool_calls[1].type: expected function, got 'custom'",
        ),
        (assistant(CALL | {"index": 0}), {}, "messages[0].tool_calls[0].index: unknown field"),
        (assistant({"function": {}}), {}, "messages[0].tool_calls[0].function.name: expected text, got None"),
        (
            assistant({"function": {"name": "f", "arguments": [1]}}),
            {},
            "messages[0].tool_calls[0].function.arguments: expected an object, got [1]",
        ),
        (MESSAGES, {"tools": TOOL}, "tools: expected a list of objects, got {"),
        (MESSAGES, {"tools": [TOOL, 1]}, "tools[1]: expected an object with a function, got 1"),
        (MESSAGES, {"tools": ["["]}, "tools[0]: not valid JSON"),
        (MESSAGES, {"tools": [TOOL | {"a": 1}]}, "tools[0].a: unknown field"),
        (MESSAGES, {"tools": [{"type": "web", "function": {}}]}, "tools[0].type: expected function, got 'web'"),
        (MESSAGES, {"tools": [{"function": {"name": 1}}]}, "tools[0].function.name: expected text, got 1"),
        (
            MESSAGES,
            {"tools": [{"function": {"name": "f", "parameters": {"a": float("nan")}}}]},
            "tools[0].function.parameters: not valid JSON",
        ),
        (MESSAGES, {"template_variables": {"a": {1}}}, "template_variables: not valid JSON"),
        (MESSAGES, {"template_variables": {"a": "\ud800"}}, "template_variables: not valid JSON"),
        (MESSAGES, {"template_variables": 1}, "template_variables: expected an object, got 1"),
        (
            MESSAGES,
            {"tool_choice": "any"},
            'tool_choice: expected "auto", "none", "required" or a function, got \'any\'',
        ),
        (MESSAGES, {"tool_choice": {"function": {"name": "f"}}}, "tool_choice: expected"),
        (MESSAGES, {"parallel_tool_calls": 1}, "parallel_tool_calls: expected true or false, got 1"),
        (MESSAGES, {"continue_final_message": 1}, "continue_final_message: expected true or false, got 1"),
        ("text", {"tools": [TOOL]}, "tools: only a prompt of messages has it"),
    ],
)
def test_what_is_wrong_is_named(messages, options, expected):
    with pytest.raises(InvalidOption) as error:
        build_start(messages, options)
    assert str(error.value).startswith(expected)

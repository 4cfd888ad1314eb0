"""The tools of /v1/responses that are not plain functions: custom tools, namespaces, hosted tools, allowed tools."""

import json
from typing import Any

import httpx
import openai
import pytest

PATCH = {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "text"}}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
GO = LOOK | {"name": "go"}
FAR = {"type": "namespace", "name": "far", "description": "Far away.", "tools": [LOOK, PATCH]}
NEAR = {"type": "namespace", "name": "near", "description": "Nearby.", "tools": [LOOK, GO]}
SEARCH = {"type": "web_search", "external_web_access": False}
TEXT = '*** Begin Patch\n+ "é"\n'


def call(name: str, **arguments: str) -> str:
    """As the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def client(scripted):
    with openai.OpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def respond(client):
    """Asks; the answer is the same whole and streamed."""

    def respond(given, **options):
        whole = client.responses.create(model="gpt-4o", input=given, **options)
        *_, last = client.responses.create(model="gpt-4o", input=given, stream=True, **options)
        changing = {"id": True, "call_id": True}
        told = [[item.model_dump(exclude=changing) for item in each.output] for each in (whole, last.response)]
        assert told[0] == told[1]
        return whole

    return respond


def test_a_custom_tool_is_called_with_a_text(respond, client):
    response = respond(f"SAY {call('patch', input=TEXT)}", tools=[PATCH])
    (item,) = response.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", TEXT)
    assert item.id.startswith("ctc_")
    assert response.tools[0].type == "custom"
    asked = {"model": "gpt-4o", "input": f"SAY {call('patch', input=TEXT)}", "tools": [PATCH]}
    events = list(client.responses.create(**asked, stream=True))
    deltas = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 1
    assert "".join(event.delta for event in deltas) == TEXT
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert done.input == TEXT


def test_a_custom_call_and_its_output_go_back(respond):
    question = {"role": "user", "content": f"SAY {call('patch', input=TEXT)}"}
    first = respond([question], tools=[PATCH])
    output = {"type": "custom_tool_call_output", "call_id": first.output[0].call_id, "output": "SAY done"}
    assert respond([question, *first.output, output], tools=[PATCH]).output_text == "done"


def test_a_custom_call_that_breaks_off_keeps_what_came(respond):
    response = respond('SAY <tool_call>\n{"name": "patch", "arguments": {"input": "*** Beg', tools=[PATCH])
    (item,) = response.output
    assert (item.input, item.model_extra["status"]) == ("*** Beg", "incomplete")


def test_tools_in_namespaces_are_distinguished(respond):
    both = call("far__look") + call("near__look")
    first, second = respond(f"SAY {both}", tools=[FAR, NEAR]).output
    assert [(item.name, item.namespace) for item in (first, second)] == [("look", "far"), ("look", "near")]
    (item,) = respond(f"SAY {call('far__patch', input='a')}", tools=[FAR]).output
    assert (item.type, item.name, item.namespace, item.input) == ("custom_tool_call", "patch", "far", "a")


def test_a_tool_in_a_namespace_may_go_by_its_own_name_if_only_one_has_it(respond):
    (item,) = respond(f"SAY {call('go')}", tools=[FAR, NEAR]).output
    assert (item.name, item.namespace) == ("go", "near")
    (item,) = respond(f"SAY {call('look')}", tools=[FAR, NEAR]).output
    assert (item.name, item.namespace) == ("look", None)


def test_a_call_into_a_namespace_goes_back_by_its_full_name(client):
    question = {"role": "user", "content": "q"}
    item = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    count = client.responses.input_tokens.count
    plain = count(input=[question, item | {"name": "far__look"}], tools=[FAR]).input_tokens
    assert count(input=[question, item | {"namespace": "far"}], tools=[FAR]).input_tokens == plain


def test_hosted_tools_are_not_offered(respond, client):
    assert respond("SAY a", tools=[SEARCH]).output_text == "a"
    (item,) = respond(f"SAY {call('look')}", tools=[SEARCH, LOOK], tool_choice="required").output
    assert item.name == "look"
    count = client.responses.input_tokens.count
    assert count(input="a", tools=[SEARCH, LOOK]).input_tokens == count(input="a", tools=[LOOK]).input_tokens


async def test_each_type_of_hosted_tools_is_logged_once(gateway, caplog):
    for _ in range(2):
        await gateway.post("/v1/responses", input="a", max_output_tokens=1, tools=[SEARCH, {"type": "file_search"}])
    told = [record.getMessage() for record in caplog.records if "hosted" in record.getMessage()]
    assert sorted(each.split(" are ")[0] for each in told) == ["tools of type file_search", "tools of type web_search"]


def test_tools_that_come_as_items_are_offered(respond):
    added = {"type": "additional_tools", "role": "developer", "tools": [PATCH]}
    (item,) = respond([added, {"role": "user", "content": f"SAY {call('patch', input='a')}"}]).output
    assert (item.type, item.input) == ("custom_tool_call", "a")


def allow(mode: str, *names: str, kind: str = "function") -> dict[str, Any]:
    """In the form of Responses."""
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": kind, "name": name} for name in names]}


def test_allowed_tools_are_those_that_the_model_is_shown(client):
    count = client.responses.input_tokens.count
    one = count(input="a", tools=[GO]).input_tokens
    assert one < count(input="a", tools=[LOOK, GO]).input_tokens
    assert count(input="a", tools=[LOOK, GO], tool_choice=allow("auto", "go")).input_tokens == one
    far = count(input="a", tools=[FAR]).input_tokens
    for choice in (allow("required", "far", kind="namespace"), allow("auto", "far__look", "far__patch")):
        assert count(input="a", tools=[FAR, NEAR], tool_choice=choice).input_tokens == far
    none = count(input="a").input_tokens
    hosted = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    assert count(input="a", tools=[LOOK, SEARCH], tool_choice=hosted).input_tokens == none


def test_allowed_tools_of_a_chat(client):
    tools: list[Any] = [{"type": "function", "function": {"name": name}} for name in ("look", "go")]
    allowed: dict[str, Any] = {"mode": "auto", "tools": tools[1:]}
    ask: dict[str, Any] = {"model": "gpt-4o", "messages": [{"role": "user", "content": f"SAY {call('go')}"}]}
    create = client.chat.completions.create
    chosen = create(**ask, tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert chosen.choices[0].message.tool_calls[0].function.name == "go"
    assert chosen.usage.prompt_tokens == create(**ask, tools=tools[1:]).usage.prompt_tokens
    flat: Any = allow("auto", "go")  # as the gateway smg passes it on
    assert create(**ask, tools=tools, tool_choice=flat).usage.prompt_tokens == chosen.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        create(**ask, tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed | {"mode": "any"}})
    assert caught.value.param == "tool_choice.allowed_tools.mode"


SHARED = [FAR, NEAR]
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": {"type": "web_search"}, "tools": [SEARCH]}, "tool_choice", "does not run"),
    ({"tool_choice": {"type": "mcp", "server_label": "a"}, "tools": [LOOK]}, "tool_choice", "does not run"),
    ({"tool_choice": {"type": "function", "name": "see"}, "tools": [LOOK]}, "tool_choice", "not among the tools"),
    ({"tool_choice": {"type": "function", "name": "look"}, "tools": SHARED}, "tool_choice", "more than one namespace"),
    ({"tool_choice": {"type": "custom"}, "tools": [PATCH]}, "tool_choice.name", "the name"),
    ({"tool_choice": {"type": "hammer"}, "tools": [PATCH]}, "tool_choice.type", "allowed_tools"),
    ({"tool_choice": allow("auto", "see"), "tools": [LOOK]}, "tool_choice.tools[0]", "not among the tools"),
    ({"tool_choice": allow("any", "look"), "tools": [LOOK]}, "tool_choice.mode", "required"),
    ({"tool_choice": allow("auto") | {"tools": 5}, "tools": [LOOK]}, "tool_choice.tools", "a list"),
    ({"tool_choice": allow("auto", *["look"] * 129), "tools": [LOOK]}, "tool_choice.tools", "at most 128"),
    ({"tool_choice": allow("required"), "tools": [LOOK]}, "tool_choice", "requires a call"),
    ({"tools": [NEAR | {"tools": [SEARCH]}]}, "tools[0].tools[0].type", "'function' or 'custom'"),
    ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools", "required"),
    ({"tools": [LOOK, {"type": "custom"}]}, "tools[1].name", "required"),
    ({"tools": [NEAR] * 65}, "tools", "at most 128"),
]


@pytest.mark.parametrize(("body", "param", "why"), WRONG)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
def test_what_is_wrong_with_tools_is_named(scripted, path, body, param, why):
    answer = httpx.post(f"{scripted}{path}", json={"input": "SAY a"} | body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert why in error["message"]


def test_a_required_call_needs_more_than_hosted_tools(scripted):
    body = {"input": "a", "tools": [SEARCH], "tool_choice": "required"}
    error = httpx.post(f"{scripted}/v1/responses", json=body, timeout=60).json()["error"]
    assert (error["param"], "needs tools" in error["message"]) == ("tool_choice", True)


USER = {"role": "user", "content": "a"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CUSTOM = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "a"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
LONG = "c" * 300
PLACES: list[tuple[dict[str, Any], str]] = [
    ({"input": [USER, CALL | {"call_id": LONG}]}, "input[1].call_id"),
    ({"input": [USER, CALL | {"name": LONG}]}, "input[1].name"),
    ({"input": [USER, CUSTOM | {"name": LONG}]}, "input[1].name"),
    ({"input": [USER, OUTPUT | {"call_id": LONG}]}, "input[1].call_id"),
    ({"input": [USER, OUTPUT | {"type": "custom_tool_call_output", "call_id": LONG}]}, "input[1].call_id"),
    ({"instructions": "x", "input": [USER, CALL | {"call_id": LONG}]}, "input[1].call_id"),
    ({"input": [USER, {"type": "reasoning"}, CALL, CALL, CALL | {"call_id": LONG}]}, "input[4].call_id"),
    ({"input": [USER, {"role": "assistant", "content": "a"}, CALL | {"call_id": LONG}]}, "input[2].call_id"),
    ({"input": [USER, CALL, OUTPUT, OUTPUT | {"call_id": LONG}]}, "input[3].call_id"),
]


@pytest.mark.parametrize(("body", "param"), PLACES)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
def test_errors_of_the_service_name_the_callers_item(scripted, path, body, param):
    answer = httpx.post(f"{scripted}{path}", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(f"{param}: ")


def test_a_forced_call_goes_together_with_a_format_of_the_text(scripted):
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    body = {"input": f"SAY {call('look')}", "tools": [LOOK], "tool_choice": "required", "text": {"format": schema}}
    answer = httpx.post(f"{scripted}/v1/responses", json=body, timeout=60).json()
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    assert answer["text"]["format"] == schema
    refused = httpx.post(f"{scripted}/v1/responses", json=body | {"guided_regex": "a", "text": None}, timeout=60).json()
    assert refused["error"]["param"] == "tool_choice"

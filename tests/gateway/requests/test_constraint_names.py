"""Errors about what an answer must match name the schema that the caller sent."""

from typing import Any

import httpx
import pytest

BAD = {"type": "object", "properties": {"a": {"type": "hiccup"}}}
GOOD = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT = {"messages": [{"role": "user", "content": "SAY a"}]}
RESPONSE = {"input": "SAY a"}


def tool(name: str, parameters: Any, **fields: Any) -> dict[str, Any]:
    """As a chat has it."""
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def flat(name: str, parameters: Any, **fields: Any) -> dict[str, Any]:
    """As a response has it."""
    return {"type": "function", "name": name, "parameters": parameters, **fields}


def allow(*names: str) -> dict[str, Any]:
    """A choice among some of a chat's tools."""
    return {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": name}} for name in names],
        },
    }


NAMED = {"type": "function", "function": {"name": "bad"}}
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [tool("bad", BAD)], "tool_choice": "required"}, "tools[0].function.parameters"),
    ({"tools": [tool("good", GOOD), tool("bad", BAD)], "tool_choice": NAMED}, "tools[1].function.parameters"),
    ({"tools": [tool("good", GOOD), tool("bad", BAD)], "tool_choice": allow("bad")}, "tools[1].function.parameters"),
    ({"tools": [tool("good", GOOD), tool("bad", BAD, strict=True)]}, "tools[1].function.parameters"),
    ({"tools": [tool("good", GOOD), tool("bad", BAD)], "tool_choice": "required"}, "tools"),
    ({"response_format": {"type": "json_object", "schema": BAD}}, "response_format.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD}}},
        "response_format.json_schema.schema",
    ),
]
RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"tools": [flat("bad", BAD)], "tool_choice": "required"}, "tools[0].parameters"),
    (
        {"tools": [flat("good", GOOD), flat("bad", BAD)], "tool_choice": {"type": "function", "name": "bad"}},
        "tools[1].parameters",
    ),
    (
        {
            "tools": [{"type": "namespace", "name": "n", "description": "n", "tools": [flat("bad", BAD)]}],
            "tool_choice": "required",
        },
        "tools[0].tools[0].parameters",
    ),
    ({"text": {"format": {"type": "json_object", "schema": BAD}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": BAD}}}, "text.format.schema"),
]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("chat/completions", CHAT | fields, param) for fields, param in CHATS]
    + [("responses", RESPONSE | fields, param) for fields, param in RESPONSES],
)
def test_the_schema_at_fault_is_named(scripted: str, path: str, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{scripted}/v1/{path}", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(f"{param}: cannot be used as a constraint")

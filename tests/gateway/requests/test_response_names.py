"""The caller's names for the parts of a Responses request that the service refuses."""

from typing import cast

import pytest

from penstock.clients.gateway.requests.responses import as_chat
from penstock.clients.gateway.schemas.responses import InputItem, ResponsesRequest

CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "a"}
INPUT = [{"role": "user", "content": "a"}, CALL, OUTPUT]


def names_of_two_turns():
    """The names in a request that continues another one with the same input."""
    body = ResponsesRequest.model_validate({"input": INPUT})
    return as_chat(body, cast("list[InputItem]", body.input)).names


@pytest.mark.parametrize(
    ("field", "earlier", "own"),
    [
        ("content", "previous_response_id", "input[0].content"),
        ("role", "previous_response_id", "input[0].role"),
        ("", "previous_response_id", "input[0]"),
    ],
)
def test_what_is_wrong_in_an_earlier_turn_is_the_previous_responses(field, earlier, own):
    names = names_of_two_turns()
    rest = f".{field}" if field else ""
    assert names.caller_name(f"start.chat.messages[0]{rest}") == earlier
    assert names.caller_name(f"chat.messages[3]{rest}") == own


def test_calls_are_named_by_their_items():
    names = names_of_two_turns()
    call = "chat.messages[{}].tool_calls[0].arguments_json"
    assert names.caller_name(call.format(1)) == "previous_response_id"
    assert names.caller_name(call.format(4)) == "input[1].arguments"
    assert names.caller_name("chat.messages[5].tool_call_id") == "input[2].call_id"

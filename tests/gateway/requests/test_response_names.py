"""The caller's names for the parts of a Responses request that the service refuses."""

import pytest

from penstock.clients.gateway.requests.responses import as_chat
from penstock.clients.gateway.schemas.responses import ResponsesRequest

CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "a"}
INPUT = [{"role": "user", "content": "a"}, CALL, OUTPUT]


@pytest.mark.parametrize(
    ("field", "earlier", "own"),
    [
        ("content", "previous_response_id", "input[0].content"),
        ("role", "previous_response_id", "input[0].role"),
        ("", "previous_response_id", "input[0]"),
    ],
)
def test_what_is_wrong_in_an_earlier_turn_is_the_previous_responses(field, earlier, own):
    body = ResponsesRequest(input=INPUT)
    names = as_chat(body, ResponsesRequest(input=INPUT).input).names
    rest = f".{field}" if field else ""
    assert names.caller_name(f"start.chat.messages[0]{rest}") == earlier
    assert names.caller_name(f"chat.messages[3]{rest}") == own


def test_calls_are_named_by_their_items():
    names = as_chat(ResponsesRequest(input=INPUT), ResponsesRequest(input=INPUT).input).names
    call = "chat.messages[{}].tool_calls[0].arguments_json"
    assert names.caller_name(call.format(1)) == "previous_response_id"
    assert names.caller_name(call.format(4)) == "input[1].arguments"
    assert names.caller_name("chat.messages[5].tool_call_id") == "input[2].call_id"

"""Errors name the caller's own field, be it the gateway that finds the fault or the service, which has other names."""

import json
from typing import Any

from penstock.clients.gateway.field_names import CHAT_NAMES, caller_name

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "hi"}]


def called(id: str = "c", name: str = "f") -> dict[str, Any]:
    """A message with a call."""
    return {"role": "assistant", "tool_calls": [{"id": id, "function": {"name": name, "arguments": "{}"}}]}


NO_TEXT_SCHEMA = {"type": "json_schema", "name": "a", "schema": {"not": {}}}
NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": [5, -1]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [5, 1.5]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [[5, 6], [5, -1]]}, "prompt[1][1]"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": {"a": 5}}, "prompt"),
    (COMPLETIONS, {"prompt": [[300]]}, "prompt[0][0]"),
    (COMPLETIONS, {"prompt": [[1], [2, 300]]}, "prompt[1][1]"),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": ["b", ""]}, "stop[1]"),
    (COMPLETIONS, {"prompt": "a", "bad_words": ["b", ""]}, "bad_words[1]"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1, 999]}, "stop_token_ids[1]"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias[999]"),
    (CHAT, {"messages": [*HELLO, called(name="f" * 300)]}, "messages[1].tool_calls[0].function.name"),
    (CHAT, {"messages": [*HELLO, called(id="c" * 300)]}, "messages[1].tool_calls[0].id"),
    (CHAT, {"messages": [*HELLO, {"role": "tool", "tool_call_id": "c" * 300}]}, "messages[1].tool_call_id"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, {"messages": HELLO, "stop": ""}, "stop"),
    (RESPONSES, {"input": "a", "stop": ""}, "stop"),
    (RESPONSES, {"input": "a", "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    (RESPONSES, {"input": "a", "top_logprobs": 21}, "top_logprobs"),
    ("/tokenize", {"messages": [*HELLO, called(name="f" * 300)]}, "messages[1].tool_calls[0].function.name"),
    ("/tokenize", {"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ("/detokenize", {"tokens": [1, 999]}, "tokens[1]"),
    (COMPLETIONS, {"prompt": "a", "guided_choice": ["a", ""]}, "guided_choice[1]"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"grammar": "start: %"}}, "structured_outputs.grammar"),
    (CHAT, {"messages": HELLO, "response_format": NO_SCHEMA}, "response_format.json_schema.schema"),
    (
        RESPONSES,
        {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "text.format.schema",
    ),
    (RESPONSES, {"input": "a", "guided_choice": ["a", ""]}, "guided_choice[1]"),
    (RESPONSES, {"input": "a", "guided_regex": "a", "text": {"format": {"type": "json_object"}}}, "text.format"),
]
"""Path, body, and the field that is to be named."""


async def test_errors_name_the_callers_field(gateway, subtests):
    for path, body, param in WRONG:
        with subtests.test(f"{path} {body}"):
            content = json.dumps(body).encode()
            response = await gateway.http.post(path, content=content, headers={"Content-Type": "application/json"})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), error
            assert error["message"].startswith(f"{param}: ")


async def test_a_token_id_is_an_integer_from_0(gateway):
    async def message(**body: Any) -> str:
        path = "/v1/embeddings" if "input" in body else COMPLETIONS
        error: str = (await gateway.post(path, **body)).json()["error"]["message"]
        return error

    assert "greater than or equal to 0" in await message(prompt=[5, -1])
    for given in ([1.0], [5, 1.5], [[5, 1.5]]):
        place = "[0][1]" if isinstance(given[0], list) else f"[{len(given) - 1}]"
        told = await message(input=given)
        assert told.startswith(f"input{place}: ")
        assert "integer" in told
    assert "a list of token ids" in await message(prompt=5)


def test_a_pattern_matches_whole_names() -> None:
    names = ((r"chat\.tool", "x"), (r"constraint\.choices\.values", "guided_choice"))
    assert caller_name("chat.tools[1]", names) == "tools[1]"
    assert caller_name("start.constraint.choices.values[1]", names) == "guided_choice[1]"
    assert caller_name("start.sampling.temperature") == "temperature"
    assert caller_name("chat.messages[1].tool_calls[0].name", CHAT_NAMES) == "messages[1].tool_calls[0].function.name"
    assert caller_name("chat", CHAT_NAMES) == "messages"

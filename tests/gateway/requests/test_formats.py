"""Formats of tool calls and reasoning, as the chat template shows them."""

import pytest
from starlette.datastructures import Headers

from penstock.clients.gateway.requests.formats import OutputFormats, formats_of
from penstock.clients.gateway.schemas.chat import ChatRequest

TURNS = "{% for m in messages %}<|turn|>{{ m.role }} {{ m.content }}"
CALLS = TURNS + "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
END = "{% endfor %}{% endfor %}{{ tools | tojson if tools }}<|turn|>assistant"
TOOL = {"type": "function", "function": {"name": "find", "parameters": {}}}
HERMES = '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
LLAMA = '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
MISTRAL = '[TOOL_CALLS] [{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]'
PYTHONIC = "[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %})]"
QWEN_CODER = "<tool_call><function={{ f.name }}></function></tool_call>"
OPENED = (
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)
CLOSED = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


async def formats(start_gateway, tokenizer_with, template, body=None, **settings):
    """Of a request to a model with this template."""
    gateway = await start_gateway(tokenizer=tokenizer_with(template), **settings)
    caller = await gateway.app.state.link.caller(Headers())
    request = {"messages": [{"role": "user", "content": "q"}], "tools": [TOOL]} | (body or {})
    return await formats_of(ChatRequest.model_validate(request), caller)


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        (HERMES, "hermes"),
        (LLAMA, "llama3_json"),
        (MISTRAL, "mistral"),
        (PYTHONIC, "pythonic"),
        (QWEN_CODER, "qwen3_coder"),
        ("", None),
    ],
)
async def test_a_template_shows_how_calls_are_written(start_gateway, tokenizer_with, shown, name):
    found = await formats(start_gateway, tokenizer_with, CALLS + shown + END)
    assert found == OutputFormats(name, None, False)


async def test_a_template_that_refuses_the_question_shows_nothing(start_gateway, tokenizer_with):
    refusing = "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    found = await formats(start_gateway, tokenizer_with, refusing + CALLS + HERMES + END)
    assert found.tool is None


@pytest.mark.parametrize(
    ("template", "variables", "expected"),
    [
        (OPENED, {}, OutputFormats(None, "think", True)),
        (OPENED, {"enable_thinking": False}, OutputFormats(None, "think", False)),
        (CLOSED, {}, OutputFormats(None, "think", False)),
        ("", {}, OutputFormats(None, None, False)),
    ],
)
async def test_a_template_shows_how_reasoning_is_marked(start_gateway, tokenizer_with, template, variables, expected):
    body = {"tools": None, "chat_template_kwargs": variables}
    assert await formats(start_gateway, tokenizer_with, CALLS + END + template, body) == expected


async def test_the_operator_has_the_last_word(start_gateway, tokenizer_with):
    settings = {"tool_call_parser": "mistral", "reasoning_parser": "none"}
    found = await formats(start_gateway, tokenizer_with, CALLS + HERMES + END + OPENED, **settings)
    assert found == OutputFormats("mistral", None, False)


async def test_tools_of_an_unknown_form_are_refused(start_gateway, tokenizer_with):
    gateway = await start_gateway(tokenizer=tokenizer_with(CALLS + END))
    body = {"messages": [{"role": "user", "content": "q"}], "tools": [TOOL]}
    response = await gateway.post("/v1/chat/completions", **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert "--tool-call-parser" in response.json()["error"]["message"]


async def test_what_templates_show_is_kept_small_and_for_a_minute(start_gateway, tokenizer_with, monkeypatch):
    shown = "{{ extra if extra is defined else '' }}" * 8
    gateway = await start_gateway(tokenizer=tokenizer_with(CALLS + END + CLOSED + shown))
    caller = await gateway.app.state.link.caller(Headers())
    for size in (10, 20_000):
        body = {"messages": [{"role": "user", "content": "q"}], "chat_template_kwargs": {"extra": "x" * size}}
        await formats_of(ChatRequest.model_validate(body), caller)
    assert caller.rendered
    assert all(len(key) == 32 for key in caller.rendered)
    assert max(len(prompt.text) for prompt in caller.rendered.values()) < 20_000
    monkeypatch.setattr("penstock.clients.gateway.upstream.service_link._RENDERED_S", 0.0)
    assert not caller.rendered  # a service that comes back may have another template


@pytest.mark.parametrize(
    ("content", "is_open"),
    [
        ("<think>so", True),
        ([{"type": "text", "text": "<think>"}, {"type": "text", "text": "so"}], True),
        ([{"type": "text", "text": "<think>"}, {"type": "text", "text": "so</think>"}], False),
    ],
)
async def test_an_answer_that_is_continued_may_be_within_its_reasoning(start_gateway, tokenizer_with, content, is_open):
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    body = {"messages": history, "tools": None, "continue_final_message": True}
    found = await formats(start_gateway, tokenizer_with, CALLS + END + CLOSED, body)
    assert found == OutputFormats(None, "think", is_open)

"""``tool_choice`` that forces a call, live: the demo model knows nothing of tools, only the grammar makes it call."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import Any

import httpx
import jsonschema
import pytest
from texts.tool_texts import folded, whole

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHOWN = {
    "hermes": '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>",
    "mistral_named": "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}",
}
"""How a template writes a call."""
KINDS = {
    "hermes": ("hermes", "auto"),
    "llama3_json": ("hermes", "llama3_json"),
    "mistral_list": ("hermes", "mistral"),
    "mistral_named": ("mistral_named", "auto"),
    "pythonic": ("hermes", "pythonic"),
}
"""Which template shows it, and what the operator says."""
LIKE_OTHERS = ("mistral_list", "pythonic")
"""Formats that the tests of grammars cover well enough: each format here needs a service of its own."""
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "unit": {"enum": ["C", "F"]},
            "hours": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "maxItems": 3},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "dice": {
        "type": "object",
        "properties": {
            "sides": {"type": "integer", "minimum": 2, "maximum": 20},
            "fair": {"type": ["boolean", "null"]},
        },
        "required": ["sides"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]


@pytest.fixture(scope="module")
def serve_demo(
    tmp_path_factory: pytest.TempPathFactory, start_serving: Callable[..., AbstractContextManager[Any]]
) -> Iterator[Callable[[str, str], str]]:
    """The demo model's address, with one of the templates; started once."""
    with ExitStack() as stack:

        @cache
        def serve(shown: str, parser: str) -> str:
            path = tmp_path_factory.mktemp("template") / "template.jinja"
            path.write_text(TEMPLATE.replace("CALL", SHOWN[shown]))
            flags = [f"--chat-template={path}", "--backend=reference", "--max-model-len=2048"]
            flags.append(f"--tool-call-parser={parser}")
            target: str = stack.enter_context(start_serving(*flags)).target
            return target

        yield serve


class Chat:
    """Chats of one gateway."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ask(self, **fields: Any) -> tuple[str, str, list[list[str]], str]:
        """Content, reasoning, calls and the reason of an answer, which is the same one whole and streamed."""
        asked = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 80, **fields}
        response = await self._http.post("/v1/chat/completions", json={"tools": TOOLS} | asked)
        assert response.status_code == 200, response.text
        answer: tuple[str, str, list[list[str]], str] = whole(response.json())
        streamed = await self._http.post("/v1/chat/completions", json={"tools": TOOLS, "stream": True} | asked)
        events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line.startswith("data: {")]
        assert folded(map(json.loads, events)) == answer
        return answer


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.soak) if kind in LIKE_OTHERS else kind for kind in KINDS])
async def chat(
    request: pytest.FixtureRequest, serve_demo: Callable[[str, str], str], http_before: Any
) -> AsyncIterator[Chat]:
    """Of the demo model, which is taken to write calls in each of the formats."""
    shown, parser = KINDS[request.param]
    async with http_before(serve_demo(shown, parser)) as (_, http):
        yield Chat(http)


def check_calls(calls: list[list[str]]) -> None:
    """That all are valid."""
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("temperature", [0, 1])
async def test_the_demo_model_calls_a_tool(chat: Chat, temperature: int) -> None:
    """At each temperature, one call or as many as it likes."""
    content, _, calls, reason = await chat.ask(
        tool_choice="required", parallel_tool_calls=False, temperature=temperature, seed=1
    )
    assert (content, len(calls), reason) == ("", 1, "tool_calls")
    check_calls(calls)
    content, _, calls, reason = await chat.ask(tool_choice="required", temperature=temperature, seed=2)
    assert calls
    assert content == ""
    assert reason in ("length", "tool_calls")
    check_calls(calls if reason == "tool_calls" else calls[:-1])


async def test_a_named_function_is_called(chat: Chat) -> None:
    wanted = {"type": "function", "function": {"name": "dice"}}
    content, _, calls, reason = await chat.ask(tool_choice=wanted, temperature=0.7, seed=5)
    assert (content, [name for name, _ in calls], reason) == ("", ["dice"], "tool_calls")
    check_calls(calls)


async def test_strict_tools_leave_a_text_as_it_is(chat: Chat) -> None:
    strict = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    free = await chat.ask(temperature=0, max_tokens=15)
    assert free[0]
    assert await chat.ask(temperature=0, max_tokens=15, tools=strict) == free


async def test_a_forced_call_that_breaks_off_ends_for_its_length(chat: Chat) -> None:
    """In its marker, its name, its arguments."""
    _, _, [[name, arguments]], _ = await chat.ask(tool_choice="required", parallel_tool_calls=False, seed=1)
    for max_tokens in (1, 6):
        fields = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 1, "max_tokens": max_tokens}
        content, _, calls, reason = await chat.ask(**fields)
        assert (content, reason) == ("", "length")
        assert all(each[0] == name and arguments.startswith(each[1]) for each in calls)

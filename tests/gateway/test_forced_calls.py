"""``tool_choice`` that forces a call, live: the demo model knows nothing of tools, only the grammar makes it call."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jsonschema
import openai
import pytest

from penstock.clients.gateway.tool_grammar import call_grammar
from penstock.models.grammar import compile_grammar, read_tokenizer, to_grammar

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "dice": {
        "type": "object",
        "properties": {"sides": {"type": "integer", "minimum": 2, "maximum": 20}},
        "required": ["sides"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
CALLS = {
    "hermes": '<tool_call>\n{"name": "dice", "arguments": {"sides": 6}}\n</tool_call>',
    "llama3_json": '{"name": "dice", "parameters": {"sides": 6}}',
}
BETWEEN = {"hermes": "\n", "llama3_json": "; "}


@pytest.fixture(scope="module")
def client(
    tmp_path_factory: pytest.TempPathFactory, start_serving: Callable[..., AbstractContextManager[Any]]
) -> Iterator[openai.OpenAI]:
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    with (
        start_serving(f"--chat-template={path}", "--backend=reference", "--max-model-len=2048") as served,
        openai.OpenAI(base_url=served.openai, api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Hello"}]
    return client.chat.completions.create(
        model="demo", messages=messages, tools=TOOLS, max_tokens=300, temperature=0.7, **fields
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_demo_model_calls_a_tool(client: openai.OpenAI, seed: int) -> None:
    [choice] = ask(client, seed=seed, tool_choice="required", parallel_tool_calls=False).choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    [call] = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_a_named_function_is_called_whole_and_streamed(client: openai.OpenAI) -> None:
    wanted = {"type": "function", "function": {"name": "dice"}}
    [call] = ask(client, seed=5, tool_choice=wanted).choices[0].message.tool_calls
    assert call.function.name == "dice"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS["dice"])
    pieces = [chunk.choices[0].delta.tool_calls for chunk in ask(client, seed=5, tool_choice=wanted, stream=True)]
    arguments = "".join(piece.function.arguments or "" for part in pieces for piece in part or [])
    assert arguments == call.function.arguments


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("form", sorted(CALLS))
@pytest.mark.parametrize(("reasoning", "opened"), [(None, False), ("think", False), ("think", True)])
def test_grammars_allow_calls_and_nothing_else(form: str, one: bool, reasoning: str | None, opened: bool) -> None:
    tokenizer = read_tokenizer("models/demo", (), 4096, [4093, 4095])
    grammar = call_grammar(form, list(SCHEMAS.items()), one=one, reasoning=reasoning, in_reasoning=opened)
    whole = compile_grammar(tokenizer, to_grammar("lark", grammar))

    def takes(text: str) -> bool:
        matcher = whole.deep_copy()
        tokens = tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    call, thought = CALLS[form], "a </b> thought\n</think>\n\n"
    assert takes(call) == (not opened)
    assert takes("<think>" + thought + call) == (reasoning is not None)
    assert takes(thought + call) == opened
    before = thought if opened else ""
    assert takes(before + call)
    assert takes(before + call + BETWEEN[form] + call) == (not one)
    assert not takes(before + call.replace("dice", "cards"))
    assert not takes(before + call.replace("6", "60"))
    assert not takes(before + "Hello")

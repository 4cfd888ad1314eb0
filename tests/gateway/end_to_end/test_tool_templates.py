"""Tool calls and reasoning in answers of a service, whose chat template tells how its model writes them."""

import json
from pathlib import Path

import pytest
import tokenizers
from texts.tool_texts import ARGUMENTS, ONE, folded, whole
from tokenizers import decoders, models, pre_tokenizers

import penstock.v1 as pb
from penstock.clients.gateway.requests.chat import build_chat
from penstock.clients.gateway.schemas.chat import ChatRequest
from penstock.service.requests.answer_formats import find_formats
from penstock.service.requests.chat import ToolSchemas
from penstock.service.requests.tool_choice import CallConstraints
from penstock.service.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parents[2] / "service" / "templates"
FORMATS = {"qwen3": "hermes", "llama31": "llama3_json", "mistral": "mistral", "pythonic": "pythonic"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
PYTHONIC = (
    "{{ tools or '' }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}="
    "{{ v | tojson }}{% endfor %})]{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
THINKS = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content is string %}<think>\n{{ m.reasoning_content }}\n"
    "</think>{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{% endfor %}"
)
OWN = {"pythonic": PYTHONIC, "thinks": THINKS}
END, TOOL_CALLS = 256, 257


@pytest.fixture
def load(tmp_path):
    """A tokenizer whose ids are bytes, with the template of a kind of model."""

    def load(kind):
        letters = pre_tokenizers.ByteLevel.alphabet()
        moved = iter(sorted(letter for letter in letters if ord(letter) > 255))
        vocab = {(chr(byte) if chr(byte) in letters else next(moved)): byte for byte in range(256)}
        library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens(["<END>", "[TOOL_CALLS]"])
        library.save(str(tmp_path / "tokenizer.json"))
        template = OWN.get(kind) or (TEMPLATES / f"{kind}.jinja").read_text()
        config = {"eos_token": "<END>", "bos_token": "<END>", "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer(tmp_path)

    return load


def says(text):
    """A model that answers whatever it is asked with the same text."""
    before, marker, after = text.partition("[TOOL_CALLS]")
    ids = [*before.encode(), *([TOOL_CALLS] if marker else []), *after.encode(), END]
    begins: dict[int, int] = {}

    def next_token(history, sampling):
        said = len(history) - begins.setdefault(sampling.seed, len(history))
        return ids[min(said, len(ids) - 1)]

    return next_token


def body(**fields):
    return {"model": "bytes", "messages": [{"role": "user", "content": "Rain?"}], **fields}


PATH = "/v1/chat/completions"


@pytest.mark.parametrize("kind", FORMATS)
async def test_the_chat_template_determines_the_format(kind, start_gateway, load):
    """A service whose model writes what models of its kind write: the gateway finds out how to read it."""
    said = "Hm. " * (kind in ("qwen3", "mistral"))
    gateway = await start_gateway(says(said + ONE[FORMATS[kind]]), tokenizer=load(kind))
    expected = (said.strip(), "", [["weather", ARGUMENTS]], "tool_calls")
    answer = (await gateway.post(PATH, **body(tools=[TOOL]))).json()
    assert whole(answer) == expected
    assert folded(await gateway.chunks(PATH, **body(tools=[TOOL]))) == expected
    plain = (await gateway.post(PATH, **body(tools=[TOOL], tool_choice="none"))).json()
    assert whole(plain) == (said + ONE[FORMATS[kind]].replace("[TOOL_CALLS]", ""), "", [], "stop")
    # What was called goes back, with its result, to a template that insists on its form.
    call = answer["choices"][0]["message"]
    result = {"role": "tool", "content": "yes", "tool_call_id": call["tool_calls"][0]["id"]}
    more = await gateway.post(PATH, **body(tools=[TOOL]) | {"messages": [*body()["messages"], call, result]})
    assert more.status_code == 200, more.text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("Yes", "Hm.", [], "stop")),
        ({"include_reasoning": False}, ("Yes", "", [], "stop")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ("Yes", "Hm.", [], "stop")),
    ],
)
async def test_the_chat_template_determines_the_reasoning(fields, expected, start_gateway, load):
    gateway = await start_gateway(says("<think>\nHm.\n</think>\n\nYes"), tokenizer=load("qwen3"))
    assert whole((await gateway.post(PATH, **body(**fields))).json()) == expected
    assert folded(await gateway.chunks(PATH, **body(**fields))) == expected


async def test_an_answer_that_is_continued_in_its_reasoning(start_gateway, load):
    gateway = await start_gateway(says(" this.</think>Yes"), tokenizer=load("qwen3"))
    messages = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "<think>I think"}]
    answer = await gateway.post(PATH, **body(continue_final_message=True) | {"messages": messages})
    assert whole(answer.json()) == ("Yes", "this.", [], "stop")


async def test_errors_in_tools_are_reported(start_gateway, load):
    gateway = await start_gateway(says("x"), tokenizer=load("qwen3"), service={"tool_call_parser": "none"})
    answer = await gateway.post(PATH, **body(tools=[TOOL]))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    call = {"id": "c", "type": "function", "function": {"name": "w" * 300, "arguments": "{}"}}
    messages = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = await gateway.post(PATH, **body() | {"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[1].tool_calls[0].function.name"
    answer = await gateway.post(PATH, **body(chat_template_kwargs={"tools": []}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")


async def prompt_of(gateway, history):
    """A conversation as the template shows it."""
    answer = await gateway.post(PATH, messages=history, return_token_ids=True)
    assert answer.status_code == 200, answer.text
    return bytes(token for token in answer.json()["prompt_token_ids"] if token < END).decode()


@pytest.mark.parametrize("arguments", ['{"city": "', "not json", "[]", "null", '"text"', '{"a": NaN}'])
@pytest.mark.parametrize("kind", [*FORMATS])
async def test_a_broken_call_does_not_end_the_conversation(kind, arguments, start_gateway, load):
    """Neither in a chat nor in Responses, with whatever template."""
    gateway = await start_gateway(says("x"), tokenizer=load(kind))
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    user = body()["messages"][0]
    history = [user, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history.append({"role": "tool", "tool_call_id": "abcdefghi", "content": "it was cut off"})
    shown = await prompt_of(gateway, history)
    assert arguments in shown or json.dumps(arguments) in shown
    items = [user, {"type": "function_call", "call_id": "abcdefghi", "name": "weather", "arguments": arguments}]
    items.append({"type": "function_call_output", "call_id": "abcdefghi", "output": "it was cut off"})
    response = await gateway.post("/v1/responses", input=items)
    assert response.status_code == 200, response.text
    chat = await gateway.post(PATH, messages=history)
    assert response.json()["usage"]["input_tokens"] == chat.json()["usage"]["prompt_tokens"]


CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_the_template_shows_reasoning_of_the_history(name, start_gateway, load):
    gateway = await start_gateway(says("x"), tokenizer=load("thinks"))
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL], name: "I must look."}
    result = {"role": "tool", "tool_call_id": "c", "content": "rain"}
    assert "<think>\nI must look.\n</think>" in await prompt_of(gateway, [*body()["messages"], turn, result])


@pytest.mark.parametrize("parts", [{"content": ["I must", "look."]}, {"summary": ["I must", "look."], "content": None}])
async def test_the_template_shows_reasoning_items(parts, start_gateway, load):
    """As it shows a chat's."""
    gateway = await start_gateway(says("x"), tokenizer=load("thinks"))
    item = {name: texts and [{"type": "text", "text": text} for text in texts] for name, texts in parts.items()}
    items = [*body()["messages"], {"type": "reasoning", "id": "rs_1", "summary": [], **item}]
    items += [{"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}]
    items += [{"type": "function_call_output", "call_id": "c", "output": "rain"}]
    response = await gateway.post("/v1/responses", input=items)
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I must\nlook."}
    history = [*body()["messages"], turn, {"role": "tool", "tool_call_id": "c", "content": "rain"}]
    assert "<think>\nI must\nlook.\n</think>" in await prompt_of(gateway, history)
    chat = await gateway.post(PATH, messages=history)
    assert response.json()["usage"]["input_tokens"] == chat.json()["usage"]["prompt_tokens"]


@pytest.fixture
def grammar_of(load):
    """The grammar that a request for a kind of model is held to; empty: none."""

    def grammar_of(kind, *, strict=None, **fields):
        calls = CallConstraints(find_formats(load(kind)))
        held = {"name": "held", "parameters": {"type": "object", "properties": {"only": {"type": "null"}}}}
        tools = [TOOL, {"type": "function", "function": held if strict is None else held | {"strict": strict}}]
        start = pb.GenerationStart(chat=build_chat(ChatRequest.model_validate(body(tools=tools, **fields))))
        if not calls.applies(start):
            return ""
        calls.check(start)
        return calls.constraint(start, ToolSchemas(start.chat)).lark

    return grammar_of


@pytest.mark.parametrize(
    ("kind", "begins"),
    [("qwen3", '"<tool_call>"'), ("llama31", '""'), ("mistral", f"<[{TOOL_CALLS}]>"), ("pythonic", '""')],
)
def test_a_forced_call_is_written_as_the_template_has_it(kind, begins, grammar_of):
    """With markers that are special tokens as such: their text is no call."""
    assert f"marked: {begins} group" in grammar_of(kind, tool_choice="required")


@pytest.mark.parametrize(
    ("kind", "is_held"), [("qwen3", True), ("llama31", False), ("mistral", True), ("pythonic", False)]
)
def test_strict_tool_calls_are_constrained_where_a_marker_separates_them_from_text(kind, is_held, grammar_of):
    grammar = grammar_of(kind, strict=True)
    assert ("text: /(?s:.*)/" in grammar) == ("held" in grammar) == ('"only"' in grammar) == is_held
    assert not grammar_of(kind, strict=True, tool_choice="none")
    assert not grammar_of(kind, strict=False)
    assert not grammar_of(kind)
    forced = {"tool_choice": "required"}
    assert grammar_of(kind, strict=True, **forced) == grammar_of(kind, **forced)

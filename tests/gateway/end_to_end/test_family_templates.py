"""Tool calls and reasoning of single model families over HTTP: the chat template determines their format."""

import json
import re
from pathlib import Path

import pytest
import tokenizers
from texts.tool_texts import ARGUMENTS, ONE, WEATHER, folded, whole
from texts.written_calls import FAMILY_FORMATS
from tokenizers import decoders, models, pre_tokenizers

import penstock.v1 as pb
from penstock.service.requests.answer_formats import find_formats
from penstock.service.requests.chat import ToolSchemas
from penstock.service.requests.tool_choice import CallConstraints
from penstock.service.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parents[2] / "service/templates"
PATH = "/v1/chat/completions"
FILES = {
    "qwen3_coder": "qwen3_coder",
    "glm45": "glm46",
    "minimax_m2": "minimax_m2",
    "kimi_k2": "kimi_k2",
    "gemma4": "gemma4",
    "harmony": "gpt_oss",
}
"""The templates of models. The model of the others has none that shows tools in a package."""
CALLS = (
    "{{{{ tools or '' }}}}{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content or '' }}}}"
    "{{% if m.tool_calls %}}{}{{% endif %}}\n{{% endfor %}}{{% if add_generation_prompt %}}assistant: {{% endif %}}"
)
OWN = {
    "deepseek_v3": CALLS.format(
        "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>"
        "{{ c.function.name }}\n```json\n{{ c.function.arguments | tojson }}\n```<｜tool▁call▁end｜>{% endfor %}"
        "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": CALLS.format(
        "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
        "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    ),
    "functiongemma": CALLS.format(
        "{% for c in m.tool_calls %}<start_function_call>call:{{ c.function.name }}{{ '{' }}"
        "{% for k, v in c.function.arguments | dictsort %}{{ k }}:"
        "{{ '<escape>' + v + '<escape>' if v is string else v | tojson }}{% if not loop.last %},{% endif %}{% endfor %}"
        "{{ '}' }}<end_function_call>{% endfor %}"
    ),
}
SPECIAL = [
    "<END>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", "<|tool_call>",
    "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<start_function_call>", "<end_function_call>", "<escape>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
]  # fmt: skip
IDS = {text: 256 + at for at, text in enumerate(SPECIAL)}
WEATHER_TOOL = {"type": "function", "function": {"name": "weather", "description": "Looks.", "parameters": WEATHER}}
every_family = pytest.mark.parametrize("form", FAMILY_FORMATS)


@pytest.fixture
def load(tmp_path):
    """A tokenizer whose ids are bytes and the families' special tokens, with the template of one."""

    def load(form):
        letters = pre_tokenizers.ByteLevel.alphabet()
        moved = iter(sorted(letter for letter in letters if ord(letter) > 255))
        vocab = {(chr(byte) if chr(byte) in letters else next(moved)): byte for byte in range(256)}
        library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens(SPECIAL)
        library.save(str(tmp_path / "tokenizer.json"))
        template = OWN.get(form) or (TEMPLATES / f"{FILES[form]}.jinja").read_text()
        config = {"eos_token": "<END>", "bos_token": "<END>", "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer(tmp_path)

    return load


def ids_of(text):
    parts = re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text)
    return [each for part in parts for each in ([IDS[part]] if part in IDS else part.encode())]


def text_of(ids):
    return b"".join(SPECIAL[each - 256].encode() if each > 255 else bytes([each]) for each in ids).decode()


def says(text):
    """A model that answers whatever it is asked with the same text."""
    ids = [*ids_of(text), IDS["<END>"]]
    begins: dict[int, int] = {}

    def next_token(history, sampling):
        said = len(history) - begins.setdefault(sampling.seed, len(history))
        return ids[min(said, len(ids) - 1)]

    return next_token


def body(**fields):
    messages = [{"role": "user", "content": "Rain?"}]
    return {"model": "bytes", "messages": messages, "tools": [WEATHER_TOOL], **fields}


THOUGHTS = {
    "glm45": "\n<think>Hm.</think>\n",
    "minimax_m2": "Hm.\n</think>\n\n",
    "gemma4": "<|channel>thought\nHm.<channel|>",
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
}


@every_family
async def test_the_chat_template_determines_the_format(form, start_gateway, load):
    gateway = await start_gateway(says(THOUGHTS.get(form, "") + ONE[form]), tokenizer=load(form))
    expected = ("", "Hm." if form in THOUGHTS else "", [["weather", ARGUMENTS]], "tool_calls")
    response = await gateway.post(PATH, **body())
    assert response.status_code == 200, response.text
    answer = response.json()
    assert whole(answer) == expected
    assert folded(await gateway.chunks(PATH, **body())) == expected
    # The call goes back, with its reasoning and its result, in the form in which the model wrote it.
    call = answer["choices"][0]["message"]
    result = {"role": "tool", "content": "yes", "tool_call_id": call["tool_calls"][0]["id"]}
    more = await gateway.post(PATH, **body(messages=[*body()["messages"], call, result], return_token_ids=True))
    assert more.status_code == 200, more.text
    prompt = text_of(more.json()["prompt_token_ids"])
    assert re.sub(r"\s", "", SHOWN.get(form, ONE[form])) in re.sub(r"\s", "", prompt)
    if form in THOUGHTS:
        assert 0 < prompt.index("Hm.") < prompt.index("Köln") < prompt.index("yes")


SHOWN = {
    "functiongemma": "<start_function_call>call:weather{city:<escape>Köln<escape>",
    "harmony": '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Köln"',
}
"""How a template writes a call, if in another way than the model."""


@pytest.mark.parametrize(
    ("form", "begins"),
    [
        ("qwen3_coder", 'marked: "<tool_call>" group'),
        ("glm45", 'marked: "<tool_call>" group'),
        ("minimax_m2", 'marked: "<minimax:tool_call>" group'),
        ("deepseek_v3", f"marked: <[{IDS['<｜tool▁calls▁begin｜>']}]> group"),
        ("deepseek_v31", f"marked: <[{IDS['<｜tool▁calls▁begin｜>']}]> group"),
        ("kimi_k2", f"marked: <[{IDS['<|tool_calls_section_begin|>']}]> group"),
        ("gemma4", f"marked: <[{IDS['<|tool_call>']}]> group"),
        ("functiongemma", f"marked: <[{IDS['<start_function_call>']}]> group"),
        ("harmony", f"marked: <[{IDS['<|channel|>']}]> group"),
    ],
)
def test_a_forced_call_is_written_as_the_template_has_it(form, begins, load):
    calls = CallConstraints(find_formats(load(form)))
    function = pb.FunctionTool(name="weather", parameters_json=json.dumps(WEATHER))
    choice = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)
    start = pb.GenerationStart(chat=pb.Chat(tools=[pb.Tool(function=function)], tool_choice=choice))
    grammar = calls.constraint(start, ToolSchemas(start.chat)).lark
    assert begins in grammar
    assert calls.includes_reasoning(start) == ("thought" in grammar) == (form == "harmony")


async def test_reasoning_beside_a_preamble_does_not_end_a_conversation_with_gpt_oss(start_gateway, load):
    """Its template accepts only one of the two beside a call."""
    gateway = await start_gateway(says("x"), tokenizer=load("harmony"))
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]}
    messages = [*body()["messages"], turn, {"role": "tool", "content": "yes", "tool_call_id": "c"}]
    answer = await gateway.post(PATH, **body(messages=messages, return_token_ids=True))
    assert answer.status_code == 200, answer.text
    assert "I look." in text_of(answer.json()["prompt_token_ids"])


async def test_channels_of_gpt_oss_without_tools(start_gateway, load):
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    gateway = await start_gateway(says(said), tokenizer=load("harmony"))
    fields = {"model": "bytes", "messages": body()["messages"]}
    assert whole((await gateway.post(PATH, **fields)).json()) == ("Yes.", "Hm.", [], "stop")
    assert folded(await gateway.chunks(PATH, **fields)) == ("Yes.", "Hm.", [], "stop")

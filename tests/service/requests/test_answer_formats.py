"""Formats of tool calls and reasoning, as the chat template shows them."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from penstock.service.errors import Reason, ServiceError
from penstock.service.parsers.harmony import HARMONY_MARKERS
from penstock.service.requests.answer_formats import AnswerFormats, OutputFormats, find_formats
from penstock.service.text.tokenizer import Tokenizer

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


@pytest.fixture
def tokenizer_with(tmp_path):
    """Makes a tokenizer whose ids are bytes, with a chat template."""

    def write(template, special_tokens=()):
        letters = pre_tokenizers.ByteLevel.alphabet()
        moved = iter(sorted(letter for letter in letters if ord(letter) > 255))
        vocab = {(chr(byte) if chr(byte) in letters else next(moved)): byte for byte in range(256)}
        library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens(["<|end|>", "<|turn|>", "[TOOL_CALLS]", *special_tokens])
        library.save(str(tmp_path / "tokenizer.json"))
        config = {"eos_token": "<|end|>", "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer(tmp_path)

    return write


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        (HERMES, "hermes"),
        (LLAMA, "llama3_json"),
        (MISTRAL, "mistral"),
        (PYTHONIC, "pythonic"),
        (QWEN_CODER, "qwen3_coder"),
        ("<call>{{ f.name }}</call>", None),
        ("", None),
    ],
)
def test_a_template_shows_how_calls_are_written(tokenizer_with, shown, name):
    found = find_formats(tokenizer_with(CALLS + shown + END))
    assert found.plain == found.with_tools == OutputFormats(name, None)
    assert dict(found.marker_ids) == ({"[TOOL_CALLS]": 258} if name == "mistral" else {})


def test_a_template_that_refuses_the_question_shows_nothing(tokenizer_with):
    refusing = "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    assert find_formats(tokenizer_with(refusing + CALLS + HERMES + END)).with_tools.tool is None


@pytest.mark.parametrize(("template", "expected"), [(OPENED, "think"), (CLOSED, "think"), ("", None)])
def test_a_template_shows_how_reasoning_is_marked(tokenizer_with, template, expected):
    assert find_formats(tokenizer_with(CALLS + END + template)).plain == OutputFormats(None, expected)


def test_a_template_may_show_reasoning_only_beside_tools(tokenizer_with):
    formats = find_formats(tokenizer_with(CALLS + END + "{% if tools %}" + OPENED + "{% endif %}"))
    assert (formats.of(with_tools=False).reasoning, formats.of(with_tools=True).reasoning) == (None, "think")


def test_the_operator_has_the_last_word(tokenizer_with):
    found = find_formats(tokenizer_with(CALLS + HERMES + END + OPENED), "mistral", "none")
    assert found.plain == OutputFormats("mistral", None)


def test_without_a_template_only_what_the_operator_names_is_known(tokenizer_with):
    tokenizer = tokenizer_with(None)
    assert find_formats(tokenizer) == AnswerFormats()
    assert find_formats(tokenizer, reasoning_parser="think").plain == OutputFormats(None, "think")


@pytest.mark.parametrize("template", [CALLS + END, None])
def test_the_vocabulary_of_harmony_is_enough(tokenizer_with, template):
    """Simplified templates of gpt-oss render no call, and a prompt of token ids needs no template."""
    found = find_formats(tokenizer_with(template, HARMONY_MARKERS))
    assert found.plain == found.with_tools == OutputFormats("harmony", "harmony")
    assert set(found.marker_ids) == set(HARMONY_MARKERS)
    assert find_formats(tokenizer_with(template, HARMONY_MARKERS[1:])).plain == OutputFormats(None, None)
    assert find_formats(tokenizer_with(CALLS + HERMES + END, HARMONY_MARKERS)).with_tools.tool == "hermes"


def test_a_busy_machine_is_asked_again(tokenizer_with, monkeypatch):
    """Otherwise the service would not know its model's format for as long as it runs."""
    tokenizer = tokenizer_with(CALLS + HERMES + END)
    render, calls = tokenizer.render_chat, []

    def busy(chat):
        calls.append(chat)
        if len(calls) % 2:
            raise ServiceError(Reason.PREPARATION_FULL)
        return render(chat)

    monkeypatch.setattr(tokenizer, "render_chat", busy)
    assert find_formats(tokenizer).with_tools.tool == "hermes"

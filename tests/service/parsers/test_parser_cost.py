"""What a model writes costs its parser a number of operations that is linear in the text, whatever the text is."""

import json

import pytest
from counted_text import CountedText, TooManyOperations, counting
from hypothesis import given, settings, strategies as st

from penstock.clients.gateway.requests.custom_tools import CustomInput
from penstock.service.parsers.pythonic import arguments_as_json
from penstock.service.parsers.reasoning import REASONING_FORMATS
from penstock.service.parsers.registry import make_parser
from penstock.service.parsers.tool_formats import TOOL_FORMATS

PER_CHARACTER = 80
PER_PIECE = 150
KIB = 1024
TOOLS = {"f": {"properties": {"n": {"type": "integer"}, "o": {"type": ["string", "null"]}}}}

ANY_FORMAT = ["x", " ", "x ", "<", "[", "{", '"', '\\"']
TEXTS = {
    "hermes": [
        "<tool_call>",
        "<tool_call> ",
        "<tool_cal",
        '<tool_call>{"x":[',
        '<tool_call>{"x":',
        '<tool_call>{"x":["',
        '<tool_call>{"x":["a\\"',
        '<tool_call>{"x":"',
        '<tool_call>{"x\\"',
        '<tool_call>{"arguments":{"x":',
        '<tool_call>{"name":"f","arguments":{"x":[',
        '<tool_call>{"name":"f"}',
        '<tool_call>{"name":"f"}</tool_call>x ',
        '<tool_call>{"name":"f","arguments":{}}',
    ],
    "llama3_json": ['{"name":"f"};', '{"name":"f"}', '{"x":[', '{"name":"f","parameters":{"x":', '{"id":"'],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] ",
        "[TOOL_CALLS]f",
        "[TOOL_CALLS]f[CALL_ID]",
        '[TOOL_CALLS][{"x":[',
        '[TOOL_CALLS][{"x":["',
        '[TOOL_CALLS][{"x":["a\\"',
        '[TOOL_CALLS][{"x":',
        '[TOOL_CALLS][{"name":"f"},',
        '[TOOL_CALLS]f{"x":[',
        "[TOOL_CALLS]f{}",
        "[TOOL_CALLS]f{}x ",
    ],
    "pythonic": ["[f(x=[", "[f(x='", "[f(x=''", "[f(),", "f(),", "[f(x=1),", "[f(x=1,"],
    "qwen3_coder": [
        "<tool_call>",
        "<function=f",
        "<function=f>",
        "<tool_call><function=f>",
        "<function=f><parameter=x>",
        "<function=f><parameter=n>",
        "<function=f><parameter=n>1</parameter>",
        "<function=f><parameter=o></parameter",
        "<parameter=n>",
        "<parameter=n>x</parameter>",
        "</function>",
        "<function=f></function>",
        "<tool_call><function=f></function></tool_call>x ",
    ],
    "glm45": [
        "<tool_call>f",
        "<tool_call>f<arg_key>n",
        "<tool_call>f<arg_key>n</arg_key><arg_value>",
        "<tool_call>f<arg_key>x</arg_key><arg_value>",
        "<tool_call>f<arg_key>n</arg_key>",
        "<tool_call>f</tool_call>",
        "<arg_key>n</arg_key><arg_value>1</arg_value>",
    ],
    "minimax_m2": [
        "<minimax:tool_call>",
        '<minimax:tool_call><invoke name="f">',
        '<minimax:tool_call><invoke name="f"><parameter name="n">',
        '<parameter name="x">1</parameter>',
        '<invoke name="f"></invoke>',
        '<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call>',
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x":[',
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "<｜tool▁call",
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>f:0",
        '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"x":[',
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_call",
    ],
    "gemma4": [
        "<|tool_call>",
        "<|tool_call>call:f{",
        '<|tool_call>call:f{x:<|"|>',
        "<|tool_call>call:f{x:[",
        "<|tool_call>call:f{}",
        "x:1,",
        "[1,",
        '<|"|>x<|"|>,',
        "x:{",
    ],
    "harmony": [
        "<|start|>",
        "<|channel|>",
        "<|start|>assistant",
        "<|channel|>analysis",
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>x<|end|>",
        "<|channel|>commentary to=functions.f<|message|>",
        "<|channel|>commentary to=functions.f<|message|>{",
        "<|channel|>commentary to=functions.f<|message|>{}",
        "<|channel|>commentary to=functions.f ",
        "<|end|> ",
        "<|",
    ],
}
BEGINNINGS = {
    "llama3_json": ['{"x":[', '{"name":"f","parameters":{"x":['],
    "pythonic": ["[", "[f(x=[", "[f(x='"],
    "qwen3_coder": ["<function=f><parameter=n>", "<function=f><parameter=x>", "<function=f>"],
    "glm45": ["<tool_call>f<arg_key>x</arg_key><arg_value>", "<tool_call>f<arg_key>n</arg_key><arg_value>"],
    "minimax_m2": ['<minimax:tool_call><invoke name="f">'],
    "gemma4": ["<|tool_call>call:f{", "<|tool_call>call:f{x:[", '<|tool_call>call:f{x:<|"|>'],
    "harmony": ["<|channel|>analysis<|message|>", "<|channel|>commentary to=functions.f<|message|>{"],
}
CASES = [
    (name, beginning, unit)
    for name, units in TEXTS.items()
    for beginning in ["", *BEGINNINGS.get(name, ())]
    for unit in units + ANY_FORMAT
]
LONG = "not a call " * 40
ENDS = dict.fromkeys(("hermes", "llama3_json", "mistral", "pythonic"), ("", ']}"'))
small_and_large = pytest.mark.parametrize(
    ("size", "piece_size"),
    [(KIB // 2, 1), pytest.param(2 * KIB, 7, marks=pytest.mark.soak), (2 * KIB, 2 * KIB)],
)


def text_of(beginning, unit, size, end=""):
    return beginning + (unit * (size // len(unit) + 1))[: size - len(beginning)] + end


def feed(monkeypatch, parser, text, piece_size):
    num_pieces = len(text) // piece_size + 2
    with counting(monkeypatch, PER_CHARACTER * len(text) + PER_PIECE * num_pieces) as count:
        for at in range(0, len(text), piece_size):
            parser.feed(CountedText.of(text[at : at + piece_size], count))
        parser.end()


def tool_parser(name, reasoning=None, **given):
    return make_parser(name, reasoning, tools=TOOLS, new_call_id=lambda: "id", **given)


@small_and_large
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_tool_calls(monkeypatch, name, size, piece_size):
    ends = ENDS.get(name, ("",)) if piece_size > 1 else ("",)
    for beginning, unit in [(beginning, unit) for each, beginning, unit in CASES if each == name]:
        for end in ends:
            feed(monkeypatch, tool_parser(name), text_of(beginning, unit, size, end), piece_size)


@small_and_large
@pytest.mark.parametrize("in_reasoning", [False, True])
@pytest.mark.parametrize("reasoning", REASONING_FORMATS)
def test_reasoning(monkeypatch, reasoning, in_reasoning, size, piece_size):
    opens, closes = REASONING_FORMATS[reasoning].opens, REASONING_FORMATS[reasoning].closes
    units = [opens, closes, " ", "x ", f" {closes[:-1]}", f" {opens[:-1]}", closes[0], "x"]
    for beginning in ("", opens, f"{opens}x{closes}"):
        for unit in units:
            parser = tool_parser("hermes", reasoning, in_reasoning=in_reasoning)
            feed(monkeypatch, parser, text_of(beginning, unit, size), piece_size)


@pytest.mark.parametrize(
    ("name", "unit"), [("hermes", f'<tool_call>{{"x":["{LONG}",'), ("mistral", f"[TOOL_CALLS] {LONG}"), (None, "x")]
)
def test_a_mebibyte(monkeypatch, name, unit):
    for piece_size in (KIB, KIB * KIB):
        feed(monkeypatch, tool_parser(name), text_of("", unit, KIB * KIB), piece_size)


@pytest.mark.soak
@pytest.mark.parametrize("piece_size", [8, KIB * KIB])
@pytest.mark.parametrize(("name", "beginning", "unit"), CASES)
def test_a_mebibyte_of_everything(monkeypatch, name, beginning, unit, piece_size):
    feed(monkeypatch, tool_parser(name), text_of(beginning, unit, KIB * KIB), piece_size)


PARTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", '{"name":"f"', '"x":', '"arguments":{',
    "<function=f>", "<parameter=n>", "</parameter>", "<arg_key>", "<arg_value>", "<|tool_call>call:f{", '<|"|>',
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|channel|>", "<|message|>", "<|start|>assistant", " to=functions.f",
    "{", "}", "[", "]", '"', "'", "\\", ",", ":", ";", "f(", "x=", ")", " ", "1", "null", "<", "T", "é",
]  # fmt: skip
parts = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)


@settings(max_examples=10, deadline=None)
@given(parts, parts.filter(bool), parts, st.sampled_from([3, 4 * KIB]))
def test_arbitrary_texts_are_parsed_at_bounded_cost(beginning, unit, end, piece_size):
    for name in TOOL_FORMATS:
        with pytest.MonkeyPatch.context() as patch:
            feed(patch, tool_parser(name), text_of(beginning, unit, 2 * KIB, end), piece_size)


@small_and_large
@pytest.mark.parametrize("unit", ["x", "\\", "\\x", " ", '"', "\\ud83d", "{"])
@pytest.mark.parametrize("beginning", ["", "{", '{"input": "', '{"other": "'])
def test_input_of_a_custom_tool(monkeypatch, beginning, unit, size, piece_size):
    text = text_of(beginning, unit, size)
    with counting(monkeypatch, PER_CHARACTER * len(text) + PER_PIECE * (len(text) // piece_size + 2)) as count:
        custom = CustomInput()
        for at in range(0, len(text), piece_size):
            custom.append_arguments(CountedText.of(text[at : at + piece_size], count))
        custom.end()


def test_keys_of_one_hash_stay_apart():
    """A number's hash is its remainder by 2**61 - 1: a dictionary of these would compare each with all."""
    same = 2**61 - 1
    keys = [number * same for number in range(5)]
    text = "".join(f"{key}: 0, " for key in keys)
    assert arguments_as_json(f"(a={{{text}}})") == json.dumps({"a": {str(key): 0 for key in keys}})


def test_the_count_finds_what_is_not_linear(monkeypatch):
    class Quadratic:
        text = ""

        def feed(self, text):
            self.text = self.text + text

        def end(self):
            pass

    with pytest.raises(TooManyOperations):
        feed(monkeypatch, Quadratic(), "x" * 16 * KIB, 8)

"""Grammars of tool calls: what they let pass is what the parsers read as calls of the tools, with valid arguments."""

import json
import re
from typing import Any

import jsonschema
import pytest
from texts.tool_texts import take_apart
from texts.written_calls import FAMILY_FORMATS, write_calls

from penstock.models.structured_output.compiler import compile_grammar, read_tokenizer, to_grammar
from penstock.service.parsers.lark_grammar import AnswerShape, CallableTool
from penstock.service.parsers.tool_grammar import MARKED_FORMATS, call_grammar, text_grammar

DICE = {
    "type": "object",
    "properties": {"sides": {"type": "integer", "minimum": 2, "maximum": 20}},
    "required": ["sides"],
    "additionalProperties": False,
}
TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "via": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        "to": {"$ref": "#/$defs/place"},
        "note": {"type": ["string", "null"]},
        "fast": {"type": "boolean"},
    },
    "required": ["to"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "string", "pattern": '^[a-zé"]{1,9}$'}},
}
TOOLS = [CallableTool("weather", None), CallableTool("dice", DICE), CallableTool("trip", TRIP)]
SCHEMAS: dict[str, Any] = {"weather": {"type": "object"}, "dice": DICE, "trip": TRIP}
NAMED = '[TOOL_CALLS]probe_tool[CALL_ID]probecall[ARGS]{"probe": "value"}'
KINDS = {
    "hermes": ("hermes", ""),
    "llama3_json": ("llama3_json", ""),
    "mistral_list": ("mistral", ""),
    "mistral_named": ("mistral", NAMED),
    "pythonic": ("pythonic", ""),
    **{
        name: (name, "")
        for name in (
            "qwen3_coder", "glm45", "minimax_m2", "deepseek_v3", "deepseek_v31", "kimi_k2", "gemma4", "functiongemma"
        )
    },
}  # fmt: skip
CALLS = {
    "hermes": '<tool_call>\n{"name": "dice", "arguments": {"sides": 6}}\n</tool_call>',
    "llama3_json": '{"name": "dice", "parameters": {"sides": 6}}',
    "mistral_list": '[TOOL_CALLS][{"name": "dice", "arguments": {"sides": 6}}]',
    "mistral_named": '[TOOL_CALLS]dice[CALL_ID]abcABC123[ARGS]{"sides": 6}',
    "pythonic": "[dice(sides=6)]",
    "qwen3_coder": "<tool_call>\n<function=dice>\n<parameter=sides>\n6\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>dice\n<arg_key>sides</arg_key>\n<arg_value>6</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="dice">\n<parameter name="sides">6</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>dice\n```json\n"
    '{"sides": 6}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>dice<｜tool▁sep｜>{"sides": 6}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.dice:0<|tool_call_argument_begin|>"
    '{"sides": 6}<|tool_call_end|><|tool_calls_section_end|>',
    "gemma4": "<|tool_call>call:dice{sides:6}<tool_call|>",
    "functiongemma": "<start_function_call>call:dice{sides:6}<end_function_call>",
}
TWO = {
    "hermes": CALLS["hermes"] + "\n" + CALLS["hermes"],
    "llama3_json": CALLS["llama3_json"] + "; " + CALLS["llama3_json"],
    "mistral_list": CALLS["mistral_list"][:-1].replace("S][", "S] [")
    + ', {"name": "dice", "arguments": {"sides": 6}}]',
    "mistral_named": CALLS["mistral_named"] * 2,
    "pythonic": "[dice(sides=6), dice(sides=6)]",
    "qwen3_coder": CALLS["qwen3_coder"] + "\n" + CALLS["qwen3_coder"],
    "glm45": CALLS["glm45"] + "\n" + CALLS["glm45"],
    "minimax_m2": CALLS["minimax_m2"].replace(
        "</invoke>", '</invoke>\n<invoke name="dice">\n<parameter name="sides">6</parameter>\n</invoke>'
    ),
    **{
        name: CALLS[name].replace("end｜><｜tool▁calls", f"end｜>{between}{CALLS[name][20:-18]}<｜tool▁calls")
        for name, between in (("deepseek_v3", "\n"), ("deepseek_v31", ""))
    },
    "kimi_k2": CALLS["kimi_k2"].replace(
        "<|tool_calls_section_end|>", CALLS["kimi_k2"].removeprefix("<|tool_calls_section_begin|>").replace(":0", ":1")
    ),
    "gemma4": CALLS["gemma4"] * 2,
    "functiongemma": CALLS["functiongemma"] * 2,
}
MARKERS = [
    "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_call>", "<tool_call|>", '<|"|>', "<start_function_call>", "<end_function_call>", "<escape>",
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|channel>", "<channel|>",
]  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS)
marked_kind = pytest.mark.parametrize("kind", [kind for kind, (form, _) in KINDS.items() if form in MARKED_FORMATS])
are_special = pytest.mark.parametrize("are_special", [False, True])


class Matching:
    """Tells whether a grammar takes texts whole, in a vocabulary of bytes that has Mistral's markers, too."""

    def __init__(self, directory, markers):
        self._markers = markers
        path = directory / "tokenizer.json"
        written = json.loads(path.read_text())
        known = len(written["model"]["vocab"]) + len(written["added_tokens"])
        special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        written["added_tokens"] += [{"id": known + at, "content": text, **special} for at, text in enumerate(markers)]
        self.ids = {text: known + at for at, text in enumerate(markers)}
        self._directory = directory / f"with_{len(markers)}"
        self._directory.mkdir(exist_ok=True)
        (self._directory / "tokenizer.json").write_text(json.dumps(written))
        self._tokenizer = read_tokenizer(str(self._directory), (), known + len(markers), [256])

    def of(self, grammar):
        """What says whether a text matches."""
        whole = compile_grammar(self._tokenizer, to_grammar("lark", grammar, self._markers))

        def takes(text, begins=False):
            matcher = whole.deep_copy()
            tokens: list[int] = []
            for part in re.split("(" + "|".join(map(re.escape, MARKERS)) + ")", text):
                tokens += [self.ids[part]] if part in self.ids else part.encode()
            return matcher.try_consume_tokens(tokens) == len(tokens) and (begins or matcher.is_accepting())

        return takes


@pytest.fixture
def matching(byte_tokenizer, are_special):
    return Matching(byte_tokenizer.directory, MARKERS if are_special else [])


@pytest.fixture
def shape_of(matching):
    """How answers look, of a kind of model."""
    return lambda kind, **given: AnswerShape(KINDS[kind][1], matching.ids, **given)


def in_ci(shapes, chosen):
    """Parameters, of which only those that are chosen are tried in CI; every format has the same code for the rest."""
    return [pytest.param(*shape, marks=[] if shape in chosen else [pytest.mark.soak]) for shape in shapes]


@are_special
@every_kind
@pytest.mark.parametrize(
    ("one", "reasoning", "opened"),
    in_ci(
        [
            (one, reasoning, opened)
            for one in (True, False)
            for reasoning in (None, "think", "mistral")
            for opened in ((False, True) if reasoning else (False,))
        ],
        {(True, None, False), (False, "think", True), (True, "mistral", False)},
    ),
)
def test_calls_and_nothing_else(kind, one, reasoning, opened, matching, shape_of):
    shape = shape_of(kind, reasoning=reasoning, in_reasoning=opened)
    takes = matching.of(call_grammar(KINDS[kind][0], TOOLS, one=one, shape=shape))
    opens, closes = ("[THINK]", "[/THINK]") if reasoning == "mistral" else ("<think>", "</think>")
    call, thought = CALLS[kind], f"a </b> thought\n{closes}\n\n"
    assert takes(call) == (not opened)
    is_text = reasoning == "think" or not matching.ids
    assert takes(opens + thought + call) == (reasoning is not None and (is_text or not opened))
    assert takes(thought + call) == opened
    before = thought if opened else ""
    assert takes(before + TWO[kind]) == (not one)
    assert not takes(before + call.replace("dice", "cards"))
    assert not takes(before + call.replace("6", "60"))
    assert not takes(before + call + "\nso")
    assert not takes(before + "Hello")


@are_special
@marked_kind
@pytest.mark.parametrize(
    ("one", "reasoning"),
    in_ci(
        [(one, reasoning) for one in (True, False) for reasoning in (None, "think", "mistral")],
        {(True, None), (False, "think")},
    ),
)
def test_text_in_which_calls_are_held(kind, one, reasoning, matching, shape_of):
    takes = matching.of(text_grammar(KINDS[kind][0], TOOLS, one=one, shape=shape_of(kind, reasoning=reasoning)))
    call, two = CALLS[kind], TWO[kind]
    for text in ("", "Hello, {[ <tool> \n 天气", call, f"Let me see.\n{call}", f"{call}\nSo. "):
        assert takes(text), text
    assert takes(f"{two} ok") or one
    assert not takes(f"so {call.replace('6', '60')}")
    assert not takes(f"so {call.replace('dice', 'cards')}", begins=True)
    marker = re.split(r"(?<=[>\]])", call)[0]
    assert not takes(f"so {marker} is a marker", begins=True)
    if reasoning is not None:
        opens, closes = ("[THINK]", "[/THINK]") if reasoning == "mistral" else ("<think>", "</think>")
        thought = f"{opens}I write <tool_call>, so{closes}\n"
        assert takes(thought + "Hello")
        assert takes(thought + call)
        assert not takes(thought + call.replace("6", "60"))
        takes = matching.of(
            text_grammar(KINDS[kind][0], TOOLS, one=one, shape=shape_of(kind, reasoning=reasoning, in_reasoning=True))
        )
        assert takes(thought.removeprefix(opens) + "Hi " + call)
        assert not takes(thought.removeprefix(opens) + call.replace("6", "60"))


ARGUMENTS = [
    '(to="a")',
    '(via=[], to="a")',
    '(via=["a", "é"], to="b", note=null, fast=true)',
    '(to="a\\"b", fast=false)',
    '(to="a", note="it\'s\\n\\u0000 \U0001f680 \\\\d")',
]
NO_ARGUMENTS = [
    "()",
    "(via=[])",
    '(to="A")',
    '(to="a", via=[])',
    '(to="a",fast=true)',
    '(to="a", speed=1)',
    '(to="a"',
    "(to='a')",
]


@pytest.mark.parametrize("are_special", [False])
def test_python_arguments_are_held_to_the_schema_and_read_back(matching, shape_of):
    takes = matching.of(call_grammar("pythonic", TOOLS, one=False, shape=shape_of("pythonic")))
    for arguments in ARGUMENTS:
        text = f"[trip{arguments}]"
        assert takes(text), text
        _, _, [[_, name, read]], _ = take_apart([text], "pythonic", tools=SCHEMAS)
        assert name == "trip"
        jsonschema.validate(json.loads(read), TRIP)
    for arguments in NO_ARGUMENTS:
        assert not takes(f"[trip{arguments}]"), arguments
    assert takes("[weather()]"), "without a schema there is no argument to hold"


TRIPS: list[dict[str, Any]] = [
    {"to": "a"},
    {"via": [], "to": "a"},
    {"via": ["a", "é"], "to": "b", "note": None, "fast": True},
    {"to": 'a"b', "fast": False},
    {"to": "a", "note": "it's\n\U0001f680 \\d <b>, {}"},
    {"to": "a", "note": ""},
]
NO_TRIPS: list[dict[str, Any]] = [
    {},
    {"via": []},
    {"to": "A"},
    {"via": ["A"], "to": "a"},
    {"to": "a", "speed": 1},
    {"to": "a", "fast": "yes"},
]


@are_special
@pytest.mark.parametrize("kind", FAMILY_FORMATS)
def test_arguments_of_each_family_are_held_to_the_schema_and_read_back(kind, matching, shape_of):
    shape = shape_of("pythonic" if kind == "harmony" else kind)
    takes = matching.of(call_grammar(kind, TOOLS, one=False, shape=shape))

    def as_generated(arguments):
        ordered = {key: arguments[key] for key in (*TRIP["properties"], "speed") if key in arguments}
        return write_calls(kind, [("trip", ordered)]).replace(" <|constrain|>json", " json").replace("<|call|>", "")

    for arguments in TRIPS:
        text = as_generated(arguments)
        assert takes(text), text
        content, _, [[_, name, read]], is_whole = take_apart([text], kind, tools=SCHEMAS)
        assert (content, name, json.loads(read), is_whole) == ("", "trip", arguments, True)
    for arguments in NO_TRIPS:
        assert not takes(as_generated(arguments)), arguments
    assert takes(as_generated({"to": "a"}).replace("trip", "weather")), "any argument is permitted without a schema"


CHOICES = {
    "type": "object",
    "properties": {
        "unit": {"anyOf": [{"enum": ["km", "mi"]}, {"type": "null"}]},
        "code": {"type": "string", "minLength": 2, "maxLength": 3},
        "level": {"enum": [1, 2]},
        "node": {"$ref": "#/$defs/node"},
    },
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
}
CHOSEN: list[tuple[dict[str, Any], bool]] = [
    ({"unit": "km"}, True),
    ({"unit": None}, True),
    ({"unit": "m"}, False),
    ({"code": "ab"}, True),
    ({"code": "abcd"}, False),
    ({"code": "a"}, False),
    ({"level": 2}, True),
    ({"level": 3}, False),
    ({"node": {"v": 1, "next": {"v": 2, "next": None}}}, True),
    ({"node": {"v": 1, "next": {"v": "2"}}}, False),
    ({}, True),
]


@are_special
@pytest.mark.parametrize("kind", ["qwen3_coder", "glm45", "gemma4", "functiongemma"])
def test_alternatives_lengths_and_references_are_held(kind, matching, shape_of):
    tool = CallableTool("pick", CHOICES)
    takes = matching.of(call_grammar(kind, [tool], one=True, shape=shape_of(kind)))
    for arguments, is_valid in CHOSEN:
        text = write_calls(kind, [("pick", arguments)])
        if kind in ("qwen3_coder", "glm45"):  # no keys are sorted
            assert takes(text) == is_valid, text
        else:
            text = text.replace("{v:1,next", "{next").replace("{v:2,next:null}", "{next:null,v:2}")
            assert takes(text) == is_valid, text
        if is_valid:
            [[_, _, read]] = take_apart([text], kind, tools={"pick": CHOICES})[2]
            jsonschema.validate(json.loads(read), CHOICES)


@are_special
@pytest.mark.parametrize("opened", [False, True])
def test_messages_of_harmony(opened, matching, shape_of):
    shape = shape_of("pythonic", reasoning="harmony", in_reasoning=opened)
    opens, thought = "<|channel|>analysis<|message|>", "I <b>think</b>.<|end|><|start|>assistant"
    thought = thought if opened else opens + thought
    call = '<|channel|>commentary to=functions.dice json<|message|>{"sides": 6}'
    forced = matching.of(call_grammar("harmony", TOOLS, one=False, shape=shape))
    assert forced(thought + call)
    assert forced(call) != opened
    assert not forced(thought + call.replace("6", "60"))
    assert not forced(thought + call.replace("dice", "cards"))
    assert not forced(thought + "<|channel|>final<|message|>Hello")
    free = matching.of(text_grammar("harmony", TOOLS, one=False, shape=shape))
    final = "<|channel|>final<|message|>Hello"
    for text in (thought + final, thought + call, thought + opens + "so<|end|><|start|>assistant" + call):
        assert free(text), text
    for text in (final, call):
        assert free(text) != opened, text
    assert not free(thought + call.replace("6", "60"))
    assert not free(thought + call.replace("dice", "cards"))
    _, reasoning, [[_, name, _]], _ = take_apart(
        [thought + call], "harmony", "harmony", tools=SCHEMAS, in_reasoning=opened
    )
    assert (reasoning, name) == ("I <b>think</b>.", "dice")

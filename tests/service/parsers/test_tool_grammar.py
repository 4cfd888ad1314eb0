"""Grammars of tool calls: what they let pass is what the parsers read as calls of the tools, with valid arguments."""

import json
import re
from typing import Any

import jsonschema
import pytest
from texts.tool_texts import take_apart

from penstock.models.structured_output.compiler import compile_grammar, read_tokenizer, to_grammar
from penstock.service.parsers.tool_grammar import (
    MARKED_FORMATS,
    AnswerShape,
    CallableTool,
    CannotBeHeld,
    call_grammar,
    text_grammar,
)

DICE = {
    "type": "object",
    "properties": {"sides": {"type": "integer", "minimum": 2, "maximum": 20}},
    "required": ["sides"],
    "additionalProperties": False,
}
TRIP = {
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
}
CALLS = {
    "hermes": '<tool_call>\n{"name": "dice", "arguments": {"sides": 6}}\n</tool_call>',
    "llama3_json": '{"name": "dice", "parameters": {"sides": 6}}',
    "mistral_list": '[TOOL_CALLS][{"name": "dice", "arguments": {"sides": 6}}]',
    "mistral_named": '[TOOL_CALLS]dice[CALL_ID]abcABC123[ARGS]{"sides": 6}',
    "pythonic": "[dice(sides=6)]",
}
TWO = {
    "hermes": CALLS["hermes"] + "\n" + CALLS["hermes"],
    "llama3_json": CALLS["llama3_json"] + "; " + CALLS["llama3_json"],
    "mistral_list": CALLS["mistral_list"][:-1].replace("S][", "S] [")
    + ', {"name": "dice", "arguments": {"sides": 6}}]',
    "mistral_named": CALLS["mistral_named"] * 2,
    "pythonic": "[dice(sides=6), dice(sides=6)]",
}
MARKERS = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"]
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


@are_special
@every_kind
@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize(
    ("reasoning", "opened"), [(None, False), ("think", False), ("think", True), ("mistral", False), ("mistral", True)]
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
@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("reasoning", [None, "think", "mistral"])
def test_text_in_which_calls_are_held(kind, one, reasoning, matching, shape_of):
    takes = matching.of(text_grammar(KINDS[kind][0], TOOLS, one=one, shape=shape_of(kind, reasoning=reasoning)))
    call, two = CALLS[kind], TWO[kind]
    for text in ("", "Hello, {[ <tool> \n 天气", call, f"Let me see.\n{call}", f"{call}\nSo. "):
        assert takes(text), text
    assert takes(f"{two} ok") or one
    assert not takes(f"so {call.replace('6', '60')}")
    assert not takes(f"so {call.replace('dice', 'cards')}", begins=True)
    marker = "<tool_call>" if kind == "hermes" else "[TOOL_CALLS]"
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
        _, _, [[_, name, read]], _ = take_apart([text], "pythonic", tool_names=SCHEMAS)
        assert name == "trip"
        jsonschema.validate(json.loads(read), TRIP)
    for arguments in NO_ARGUMENTS:
        assert not takes(f"[trip{arguments}]"), arguments
    assert takes("[weather()]"), "without a schema there is no argument to hold"


@pytest.mark.parametrize(
    ("form", "tool", "said"),
    [
        ("pythonic", CallableTool("f", {"properties": {"from": {}}}), "'from'"),
        ("pythonic", CallableTool("f", {"properties": {"a b": {}}}), "'a b'"),
        ("pythonic", CallableTool("f", {"properties": {"ﬁ": {}}}), "'ﬁ'"),
        ("pythonic", CallableTool("f", {"anyOf": []}), "anyOf"),
        ("pythonic", CallableTool("f g", None), "'f g'"),
        ("mistral", CallableTool("f g", None), "'f g'"),
    ],
)
def test_tools_that_a_format_cannot_express_are_reported(form, tool, said):
    with pytest.raises(CannotBeHeld, match=re.escape(said)):
        call_grammar(form, [tool], one=True, shape=AnswerShape(NAMED))

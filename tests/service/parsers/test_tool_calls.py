"""Tool calls and reasoning in a model's text: however the text is cut into parts, the answer is the same one, and none
of the text is lost."""

import itertools
import json
import re

import pytest
from hypothesis import example, given, settings, strategies as st
from texts.tool_texts import ARGUMENTS, ONE, TOOLS, take_apart

from penstock.service.parsers.reasoning import REASONING_FORMATS
from penstock.service.parsers.registry import make_parser, markers
from penstock.service.parsers.tool_formats import TOOL_FORMATS

VERBATIM = {"hermes", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31", "kimi_k2", "harmony"}
"""Formats whose arguments are JSON, which is reported as it is."""
every_format = pytest.mark.parametrize("tool_format", [None, *TOOL_FORMATS])


def calls_of(text, tool_format, **options):
    """Of a text that comes at once: content, and names and arguments."""
    content, _, calls, _ = take_apart([text], tool_format, **options)
    return content, [(name, arguments) for _, name, arguments in calls]


TWO = {
    "hermes": '<tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call>\n'
    '<tool_call>\n{"arguments": {}, "name": "time"}\n</tool_call>\n',
    "llama3_json": '{"id": null, "name": "weather", "parameters": {"a": 1}}; {"name": "time", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"a": 1}}, {"arguments": {}, "name": "time"}]',
    "pythonic": "[weather(a=1), time()]",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=time>\n</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
    "<tool_call>time\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="a">1</parameter>\n</invoke>\n'
    '<invoke name="time">\n</invoke>\n</minimax:tool_call>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "gemma4": "<|tool_call>call:weather{a:1}<tool_call|><|tool_call>call:time{}<tool_call|>",
    "functiongemma": "<start_function_call>call:weather{a:1}<end_function_call>"
    "<start_function_call>call:time{}<end_function_call>",
    "harmony": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"a": 1}<|call|>'
    "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}<|call|>",
}
TEXTS: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "hermes": [
        ("Let me see.\n" + ONE["hermes"] + "\nSo.", "Let me see.So.", [("weather", ARGUMENTS)]),
        ("a < b, <tool_box>", "a < b, <tool_box>", []),
        ("  two \n", "  two \n", []),
        ('<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("time", '{"a": 1}')]),
        ('<tool_call>{"name": "time", "arguments": null}</tool_call>', "", [("time", "{}")]),
        ('<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
        ('<tool_call>{"id": [1, "]"], "name": "no", "x": {"y": "{"}, "n": 1, "arguments": {}}', "", [("no", "{}")]),
        # An end that is missing, and one that comes twice.
        ('<tool_call>{"name": "time", "arguments": {"a": "x', "", [("time", '{"a": "x')]),
        ('<tool_call>{"name": "time", "arguments": {}}}\n</tool_call>', "}\n</tool_call>", [("time", "{}")]),
        ('<tool_call>{"name": "time", "arguments": {}, "x" 1}</tool_call>', ', "x" 1}</tool_call>', [("time", "{}")]),
        # No calls.
        ("<tool_call>", "<tool_call>", []),
        ("a <tool_call> b </tool_call>", "a <tool_call> b </tool_call>", []),
        ('<tool_call>{"name": "", "arguments": {}}', '<tool_call>{"name": "", "arguments": {}}', []),
        ('<tool_call>{"name": 1, "arguments": {}}', '<tool_call>{"name": 1, "arguments": {}}', []),
        ('<tool_call>{"name": "time", "arguments": [1]}', '<tool_call>{"name": "time", "arguments": [1]}', []),
        ('<tool_call>{"arguments": {"a": ]}, "name": "f"}', '<tool_call>{"arguments": {"a": ]}, "name": "f"}', []),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}', '<tool_call>{"name": "\\ud800", "arguments": {}}', []),
        ('<tool_call>x<tool_call>{"name": "time"}', "<tool_call>x", [("time", "{}")]),
        ('<tool_call>{"a": "<tool_call>{"name": "time"}', '<tool_call>{"a": "', [("time", "{}")]),
        # Arguments whose brackets don't match: what came before is the call's, the rest is content.
        ('<tool_call>{"name": "time", "arguments": {"a": ]}}', "]}}", [("time", '{"a": ')]),
    ],
    "llama3_json": [
        ('  {"name": "time", "arguments": {}}', "", [("time", "{}")]),
        ('{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
        ('{"name": "time", "age": 3}', '{"name": "time", "age": 3}', []),
        ('Here: {"name": "time", "parameters": {}}', 'Here: {"name": "time", "parameters": {}}', []),
        (' {"city": "Köln"} is JSON. ', ' {"city": "Köln"} is JSON. ', []),
        ('{"name": "time", "parameters": {}}; so', "; so", [("time", "{}")]),
        ('{"name": "time", "parameters": {}} {"name": "x"', '{"name": "x"', [("time", "{}")]),
    ],
    "mistral": [
        ('[TOOL_CALLS]weather[ARGS]{"a": 1}[TOOL_CALLS]time[ARGS]{}', "", [("weather", '{"a": 1}'), ("time", "{}")]),
        ('[TOOL_CALLS]ns.find {"a": 1} Done', "Done", [("ns.find", '{"a": 1}')]),
        ('[TOOL_CALLS]{"name": "time"}', '[TOOL_CALLS]{"name": "time"}', []),
        ("Hm [TOOL_CALLS]not so {}", "Hm [TOOL_CALLS]not so {}", []),
        ('[TOOL_CALLS][{"name": "time", "arguments": {}}, {"name": 1}]', ', {"name": 1}]', [("time", "{}")]),
        ('[TOOL_CALLS][{"name": "time", "arguments": {}} {', "{", [("time", "{}")]),
        ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
        ("[TOOL_", "[TOOL_", []),
    ],
    "pythonic": [
        ("[ns.find(a=True, b=None, c=(1, 2), d='\\'é)', e=-1.5, f=null)] ", "",
         [("ns.find", '{"a": true, "b": null, "c": [1, 2], "d": "\'é)", "e": -1.5, "f": null}')]),
        ("\n[time()]\nand more", "and more", [("time", "{}")]),
        ("[1, 2]", "[1, 2]", []),
        ("[unknown()]", "[unknown()]", []),
        ("[time(1)]", "[time(1)]", []),
        ("[time(**{'a': 1})]", "[time(**{'a': 1})]", []),
        ("[time(a=open('x'))]", "[time(a=open('x'))]", []),
        ("[time(a={1, 2})]", "[time(a={1, 2})]", []),
        ("[time(a=1e999)]", "[time(a=1e999)]", []),
        ("[time(a='\\ud800')]", "[time(a='\\ud800')]", []),
        ("[time(a='\\d')]", "", [("time", '{"a": "\\\\d"}')]),
        ("[time(a=1, a=2)]", "[time(a=1, a=2)]", []),
        (f"[time(a={'(' * 9999}", f"[time(a={'(' * 9999}", []),
        (f"[time(a={'(' * 999}1{')' * 999})]", f"[time(a={'(' * 999}1{')' * 999})]", []),
        ("[time(a='x", "[time(a='x", []),
        ("[weather(a=1), time(2)]", ", time(2)]", [("weather", '{"a": 1}')]),
        ("[weather(a=1) time()]", "time()]", [("weather", '{"a": 1}')]),
        ("time()", "time()", []),
    ],
    # Values that are not of the schema's type.
    "qwen3_coder": [
        ("<function=time><parameter=a>three</parameter></function>", "", [("time", '{"a": "three"}')]),
        ("<function=time><parameter=a>None</parameter></function>", "", [("time", '{"a": null}')]),
        ("<function=time><parameter=a>1e999</parameter></function>", "", [("time", '{"a": 1e999}')]),
        ("<function=weather><parameter=days>[1, None, 'x']</parameter></function>", "",
         [("weather", '{"days": [1, null, "x"]}')]),
        ("<function=weather><parameter=days>[NaN]</parameter></function>", "", [("weather", '{"days": "[NaN]"}')]),
        ("<function=weather><parameter=days>[open('x')]</parameter></function>", "",
         [("weather", '{"days": "[open(\'x\')]"}')]),
        (f"<function=weather><parameter=days>{'[' * 99999}</parameter></function>", "",
         [("weather", f'{{"days": "{"[" * 99999}"}}')]),
        ("<function=ns.find><parameter=b>1</parameter></function>", "", [("ns.find", '{"b": "1"}')]),
        ("<function=nope><parameter=b>1</parameter></function>",
         "<function=nope><parameter=b>1</parameter></function>", []),
    ],
    "glm45": [
        ("<tool_call>time<arg_key>a</arg_key><arg_value>3 or 4</arg_value></tool_call>", "",
         [("time", '{"a": "3 or 4"}')]),
        ("<tool_call>nope</tool_call>", "<tool_call>nope</tool_call>", []),
    ],
    "gemma4": [("<|tool_call>call:weather{city:Köln am Rhein}<tool_call|>", "",
                [("weather", '{"city": "Köln am Rhein"}')])],
    "harmony": [("<|channel|>final<|message|>a<|end|>\n<|start|>user<|message|>b", "a\n<|start|>user<|message|>b", [])],
}  # fmt: skip
CASES = [(name, *case) for name, cases in TEXTS.items() for case in cases]
CASES += [(name, text, "", [("weather", ARGUMENTS)]) for name, text in ONE.items()]
CASES += [(name, text, "", [("weather", '{"a": 1}'), ("time", "{}")]) for name, text in TWO.items()]


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), CASES)
def test_calls_are_distinguished_from_content(tool_format, text, content, calls):
    assert calls_of(text, tool_format) == (content, calls)
    letters = take_apart(text, tool_format)
    assert letters == take_apart([text], tool_format)


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_call_streams(tool_format):
    """Its name comes first, then its arguments as they arrive; pythonic values must be whole."""
    parser = make_parser(tool_format, None, tools=TOOLS)
    pieces = [call for letter in ONE[tool_format] for call in parser.feed(letter).calls]
    assert pieces[0].name == "weather"
    assert "".join(piece.arguments for piece in pieces) == ARGUMENTS
    if tool_format in VERBATIM:
        assert max(len(piece.arguments) for piece in pieces) == 1
    elif tool_format != "pythonic":
        assert {"l", "n"} <= {piece.arguments for piece in pieces}, "strings arrive a letter at a time"


@pytest.mark.parametrize("tool_format", TWO)
def test_an_answer_that_may_only_be_calls_has_no_content_wherever_it_is_cut_off(tool_format):
    text = TWO[tool_format]
    whole = calls_of(text, tool_format)[1]
    for length in range(len(text) + 1):
        content, calls = calls_of(text[:length], tool_format, only_calls=True)
        assert content == ""
        assert [name for name, _ in calls] == [name for name, _ in whole[: len(calls)]]
    assert calls == whole


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_only_the_first_call_is_reported_where_more_are_not_wanted(tool_format):
    assert calls_of(TWO[tool_format], tool_format, parallel_calls=False) == ("", [("weather", '{"a": 1}')])


def test_ids_are_what_templates_insist_on():
    ids = {name: take_apart([text], name, new_call_id=None)[2][0][0] for name, text in ONE.items()}
    assert re.fullmatch("[A-Za-z0-9]{9}", ids["mistral"])
    assert re.fullmatch("call_[0-9a-f]{24}", ids["hermes"])
    [call] = take_apart(['[TOOL_CALLS]time[CALL_ID]abc123XYZ[ARGS]{"a": 1}'], "mistral")[2]
    assert call == ["abc123XYZ", "time", '{"a": 1}']


def test_markers_that_are_special_tokens():
    assert markers("mistral", None) == {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}
    assert markers("hermes", "think") == {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    assert markers("llama3_json", None) == markers(None, None) == frozenset()
    assert "<|channel|>" in markers("harmony", None) & markers(None, "harmony")
    assert markers("qwen3_coder", None) == {"<tool_call>", "</tool_call>", "</function>", "</parameter>"}


THOUGHTS = [
    # text, whether the prompt has begun the reasoning, reasoning, content
    ("<think>\nHm.\n</think>\n\nYes. ", False, "Hm.", "Yes. "),
    ("\n<think>Hm", False, "Hm", ""),
    ("Hm.</think>Yes", True, "Hm.", "Yes"),
    ("<think>Hm.</think>Yes", True, "Hm.", "Yes"),
    ("<think></think>Yes", False, "", "Yes"),
    (" Yes <think>no</think>", False, "", " Yes <think>no</think>"),
    ("<thin", False, "", "<thin"),
    ("  <th", False, "", "  <th"),
    ("  ", False, "", "  "),
    ("a </thin", True, "a </thin", ""),
    ("a  \n b</think>c</think>", True, "a  \n b", "c</think>"),
    ("<think>a<think>b</think>", False, "a<think>b", ""),
    ("", True, "", ""),
]


@pytest.mark.parametrize(("text", "in_reasoning", "reasoning", "content"), THOUGHTS)
def test_reasoning_is_distinguished_from_the_answer(text, in_reasoning, reasoning, content):
    for parts in ([text], text):
        assert take_apart(parts, None, "think", in_reasoning=in_reasoning) == (content, reasoning, [], True)


def test_whether_an_open_message_ends_in_reasoning():
    form = REASONING_FORMATS["think"]
    texts = ("", "a", "<think>a", "<think>a</think>b", "<think>a</think>b<think>", "a</think>")
    assert [form.is_open_in(text) for text in texts] == [False, False, True, False, True, False]


@pytest.mark.parametrize("tool_format", sorted(set(TOOL_FORMATS) - {"harmony"}))
def test_calls_come_after_reasoning_and_never_in_it(tool_format):
    call = ONE[tool_format]
    text = f"[THINK]\nI write {call}\n[/THINK]\n{call}"
    content, reasoning, calls, _ = take_apart([text], tool_format, "mistral")
    assert (content, reasoning) == ("", f"I write {call}")
    assert [arguments for _, _, arguments in calls] == [ARGUMENTS]


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<think>",
    "</think>",
    '{"name": "',
    '"arguments": ',
    "\\",
]
FRAGMENTS += [
    '"weather"',
    "weather(",
    "time",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    '"',
    "'",
    ",",
    ":",
    ";",
    " ",
    "\n",
    "a=1",
    "é",
    "null",
]
FRAGMENTS += [*ONE.values(), *TWO.values(), '{"a": ']
FRAGMENTS += [
    "<function=", "weather>", "<parameter=city>", "<parameter=a>", "</parameter>", "</function>",
    "<arg_key>a</arg_key>",
    "<arg_value>", "</arg_value>", "<minimax:tool_call>", '<invoke name="weather">', '<parameter name="city">',
    "</invoke>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "```json\n",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.time:0", "<|tool_call_argument_begin|>",
    "<|tool_call>", "call:", "city:", '<|"|>', "<tool_call|>", "<start_function_call>", "<escape>", "<|channel|>",
    "analysis", "commentary", " to=functions.", "<|constrain|>json", "<|message|>", "<|end|>", "<|start|>assistant",
]  # fmt: skip
answers = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12).map("".join)


@st.composite
def cut(draw, texts=answers):
    """A text, and parts of it."""
    text = draw(texts)
    ends = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return text, [text[start:end] for start, end in itertools.pairwise([0, *ends, len(text)])]


@every_format
@settings(max_examples=150, deadline=None)
@given(answer=cut(), reasoning=st.sampled_from([None, *REASONING_FORMATS]), in_reasoning=st.booleans())
def test_any_cut_of_a_text_gives_the_same_answer(tool_format, answer, reasoning, in_reasoning):
    text, parts = answer
    whole = take_apart([text], tool_format, reasoning, in_reasoning=in_reasoning)
    assert take_apart(parts, tool_format, reasoning, in_reasoning=in_reasoning) == whole
    assert take_apart(text, tool_format, reasoning, in_reasoning=in_reasoning) == whole


def squeezed(text):
    return re.sub(r"\s", "", text)


@every_format
@settings(max_examples=150, deadline=None)
@given(text=answers)
@example(text='<tool_call>{"name": "time", "arguments": {"a": ]}}')
@example(text='[TOOL_CALLS]é{"a": ')
def test_no_text_is_lost(tool_format, text):
    """Without calls the content is the text. With calls, what is left out is white space and what says that they are
    calls: what is there stands in the text, in this order."""
    content, _, calls, _ = take_apart([text], tool_format)
    if not calls and (tool_format != "harmony" or "<|" not in text):
        assert content == text
        return
    letters = iter(squeezed(text))
    assert all(letter in letters for letter in squeezed(content)), "the content is in the text, in its order"
    markers = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<｜tool▁sep｜>", "<|tool_call>", "call:"]
    for marker in markers:
        found = content.count(marker) + sum(arguments.count(marker) for _, _, arguments in calls)
        assert text.count(marker) - found <= len(calls), "each call takes one of each marker at most"
    if tool_format in VERBATIM:
        for _, name, arguments in calls:
            assert json.dumps(name, ensure_ascii=False)[1:-1] in text
            assert arguments == "{}" or arguments in text


@every_format
def test_long_answers_take_time_in_proportion(tool_format):
    """Fifty thousand letters, one at a time, of each kind: what is held back must not be read again and again."""
    for text in ("word " * 2500, '{"name": "' * 1500, "<tool_call>" * 1000, ONE.get(tool_format or "", "") * 50):
        content, _, calls, _ = take_apart(text, tool_format)
        assert content or calls or not text

"""Tool calls and reasoning in a model's text: however the text is cut into parts, the answer is the same one, and none
of the text is lost."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings, strategies as st
from tokenizers import decoders, models, pre_tokenizers

from penstock.clients.gateway.answer import make_parser, shows_special_tokens
from penstock.clients.gateway.reasoning import REASONING_FORMATS
from penstock.clients.gateway.tool_calls import TOOL_FORMATS
from penstock.service.tokenizer import Tokenizer

NAMES = frozenset({"weather", "time", "ns.find"})
every_format = pytest.mark.parametrize("tool_format", [None, *TOOL_FORMATS])


def take_apart(parts, tool_format, reasoning_format=None, **given):
    """Content, reasoning and calls of an answer that comes in parts."""
    numbers = itertools.count()
    options: dict[str, Any] = {"tool_names": NAMES, "new_call_id": lambda: f"id{next(numbers)}"} | given
    parser = make_parser(tool_format, reasoning_format, **options)
    content, reasoning = "", ""
    calls: list[list[str]] = []
    for piece in [*map(parser.feed, parts), parser.end()]:
        content += piece.content
        reasoning += piece.reasoning
        for call in piece.calls:
            if call.index == len(calls):
                assert call.id
                assert call.name
                calls.append([call.id, call.name, call.arguments])
            else:
                assert call.index == len(calls) - 1, "calls come one after another"
                assert (call.id, call.name) == ("", "")
                calls[-1][2] += call.arguments
    return content, reasoning, calls


def calls_of(text, tool_format, **options):
    """Of a text that comes at once: content, and names and arguments."""
    content, _, calls = take_apart([text], tool_format, **options)
    return content, [(name, arguments) for _, name, arguments in calls]


ONE = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, {"a": "}"}]}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Köln", "days": [1, {"a": "}"}]}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln", "days": [1, {"a": "}"}]}}]',
    "pythonic": '[weather(city="Köln", days=[1, {"a": "}"}])]',
}
ARGUMENTS = '{"city": "Köln", "days": [1, {"a": "}"}]}'
TWO = {
    "hermes": '<tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call>\n'
    '<tool_call>\n{"arguments": {}, "name": "time"}\n</tool_call>\n',
    "llama3_json": '{"id": null, "name": "weather", "parameters": {"a": 1}}; {"name": "time", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"a": 1}}, {"arguments": {}, "name": "time"}]',
    "pythonic": "[weather(a=1), time()]",
}
TEXTS = {
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
}  # fmt: skip
CASES = [(name, *case) for name, cases in TEXTS.items() for case in cases]
CASES += [(name, text, "", [("weather", ARGUMENTS)]) for name, text in ONE.items()]
CASES += [(name, text, "", [("weather", '{"a": 1}'), ("time", "{}")]) for name, text in TWO.items()]


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), CASES)
def test_calls_are_told_from_content(tool_format, text, content, calls):
    assert calls_of(text, tool_format) == (content, calls)
    letters = take_apart(text, tool_format)
    assert letters == take_apart([text], tool_format)


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_call_streams(tool_format):
    """Its name comes first, then its arguments a letter at a time; pythonic values must be whole."""
    parser = make_parser(tool_format, None, tool_names=NAMES)
    pieces = [call for letter in ONE[tool_format] for call in parser.feed(letter).calls]
    assert pieces[0].name == "weather"
    assert "".join(piece.arguments for piece in pieces) == ARGUMENTS
    if tool_format != "pythonic":
        assert max(len(piece.arguments) for piece in pieces) == 1


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
    shown = {name: shows_special_tokens(name, None) for name in TOOL_FORMATS}
    assert shown == {"hermes": False, "llama3_json": False, "mistral": True, "pythonic": False}
    assert not shows_special_tokens("hermes", "think")
    assert shows_special_tokens(None, "mistral")


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
def test_reasoning_is_told_from_the_answer(text, in_reasoning, reasoning, content):
    for parts in ([text], text):
        assert take_apart(parts, None, "think", in_reasoning=in_reasoning) == (content, reasoning, [])


def test_whether_an_open_message_ends_in_reasoning():
    form = REASONING_FORMATS["think"]
    texts = ("", "a", "<think>a", "<think>a</think>b", "<think>a</think>b<think>", "a</think>")
    assert [form.is_open_in(text) for text in texts] == [False, False, True, False, True, False]


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_calls_come_after_reasoning_and_never_in_it(tool_format):
    call = ONE[tool_format]
    text = f"[THINK]\nI write {call}\n[/THINK]\n{call}"
    content, reasoning, calls = take_apart([text], tool_format, "mistral")
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
answers = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12).map("".join)


@st.composite
def cut(draw, texts=answers):
    """A text, and parts of it."""
    text = draw(texts)
    ends = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return text, [text[start:end] for start, end in itertools.pairwise([0, *ends, len(text)])]


@every_format
@settings(max_examples=300, deadline=None)
@given(answer=cut(), reasoning=st.sampled_from([None, *REASONING_FORMATS]), in_reasoning=st.booleans())
def test_any_cut_of_a_text_gives_the_same_answer(tool_format, answer, reasoning, in_reasoning):
    text, parts = answer
    whole = take_apart([text], tool_format, reasoning, in_reasoning=in_reasoning)
    assert take_apart(parts, tool_format, reasoning, in_reasoning=in_reasoning) == whole
    assert take_apart(text, tool_format, reasoning, in_reasoning=in_reasoning) == whole


def squeezed(text):
    return re.sub(r"\s", "", text)


@every_format
@settings(max_examples=300, deadline=None)
@given(text=answers)
@example(text='<tool_call>{"name": "time", "arguments": {"a": ]}}')
def test_no_text_is_lost(tool_format, text):
    """Without calls the content is the text. With calls, what is left out is white space and what says that they are
    calls: what is there stands in the text, in this order."""
    content, _, calls = take_apart([text], tool_format)
    if not calls:
        assert content == text
        return
    letters = iter(squeezed(text))
    assert all(letter in letters for letter in squeezed(content)), "the content is in the text, in its order"
    markers = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"]
    for marker in markers:
        found = content.count(marker) + sum(arguments.count(marker) for _, _, arguments in calls)
        assert text.count(marker) - found <= len(calls), "each call takes one of each marker at most"
    if tool_format != "pythonic":
        for _, name, arguments in calls:
            assert json.dumps(name)[1:-1] in text
            assert arguments == "{}" or arguments in text


@every_format
def test_long_answers_take_time_in_proportion(tool_format):
    """A hundred thousand letters, one at a time, of each kind: what is held back must not be read again and again."""
    for text in ("word " * 5000, '{"name": "' * 3000, "<tool_call>" * 2000, ONE.get(tool_format or "", "") * 200):
        content, _, calls = take_apart(text, tool_format)
        assert content or calls or not text


TEMPLATES = Path(__file__).parent.parent / "service" / "templates"
FORMATS = {"qwen3": "hermes", "llama31": "llama3_json", "mistral": "mistral", "pythonic": "pythonic"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
PYTHONIC = (
    "{{ tools or '' }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}="
    "{{ v | tojson }}{% endfor %})]{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
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
        template = PYTHONIC if kind == "pythonic" else (TEMPLATES / f"{kind}.jinja").read_text()
        config = {"eos_token": "<END>", "bos_token": "<END>", "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer.load(tmp_path)

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


def folded(chunks):
    """The one choice of a streamed answer."""
    content, reasoning, calls, end = "", "", [], None
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
            end = choice["finish_reason"] or end
    return content, reasoning, calls, end


def whole(answer):
    message = answer["choices"][0]["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    return (
        message["content"] or "",
        message.get("reasoning_content") or "",
        calls,
        answer["choices"][0]["finish_reason"],
    )


PATH = "/v1/chat/completions"


@pytest.mark.parametrize("kind", FORMATS)
async def test_the_chat_template_tells_the_format(kind, start_gateway, load):
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
async def test_the_chat_template_tells_the_reasoning(fields, expected, start_gateway, load):
    gateway = await start_gateway(says("<think>\nHm.\n</think>\n\nYes"), tokenizer=load("qwen3"))
    assert whole((await gateway.post(PATH, **body(**fields))).json()) == expected
    assert folded(await gateway.chunks(PATH, **body(**fields))) == expected


async def test_an_answer_that_is_continued_in_its_reasoning(start_gateway, load):
    gateway = await start_gateway(says(" this.</think>Yes"), tokenizer=load("qwen3"))
    messages = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "<think>I think"}]
    answer = await gateway.post(PATH, **body(continue_final_message=True) | {"messages": messages})
    assert whole(answer.json()) == ("Yes", "this.", [], "stop")


async def test_what_is_wrong_with_tools_is_told(start_gateway, load):
    gateway = await start_gateway(says("x"), tokenizer=load("qwen3"), tool_call_parser="none")
    answer = await gateway.post(PATH, **body(tools=[TOOL]))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{"}}
    messages = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = await gateway.post(PATH, **body() | {"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[1].tool_calls[0].arguments"
    answer = await gateway.post(PATH, **body(chat_template_kwargs={"tools": []}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")

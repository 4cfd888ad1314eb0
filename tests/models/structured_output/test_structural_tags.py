"""Structural tags: their grammars accept the same strings as xgrammar, and formats that cannot be enforced are refused
by name. The strings and xgrammar's verdicts (version 0.2.8) are in structural_tags.json."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from penstock.models.structured_output.compiler import (
    GrammarError,
    compile_grammar,
    discreet,
    read_tokenizer,
    to_grammar,
)
from penstock.models.structured_output.tag_formats import MAX_LEVELS

BYTES = LLTokenizer("byte")
CASES = json.loads(Path(__file__).with_name("structural_tags.json").read_text())
DEMO = Path(__file__).parents[3] / "models" / "demo"
SPECIAL = {"<|im_start|>": 4094, "<|im_end|>": 4095, "<|endoftext|>": 4093}
EOS = [4093, 4095]
START = 4094
"""A special token that does not end an output."""
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}


def tag(begin: Any = "<a>", content: Any = INTEGER, end: Any = "</a>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def tags(**fields: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<"], "tags": [tag()], **fields}


def converted(form: Any, **options: Any) -> str:
    return to_grammar("structural_tag_json", json.dumps({"type": "structural_tag", "format": form}), **options)


def takes(grammar: str, tokenizer: LLTokenizer, token_ids: list[int]) -> bool:
    matcher = compile_grammar(tokenizer, grammar).deep_copy()
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_same_strings_as_in_xgrammar(case: dict[str, Any]) -> None:
    """Cases that xgrammar accepts only because there a text may contain its own end, or because of white space."""
    grammar = to_grammar("structural_tag_json", json.dumps(case["tag"]))
    expected = dict.fromkeys(case["accepted"], True) | dict.fromkeys(
        [*case["refused"], *case.get("stricter", ())], False
    )
    assert {text: takes(grammar, BYTES, list(text.encode())) for text in expected} == expected


@pytest.fixture(scope="module")
def demo() -> LLTokenizer:
    return read_tokenizer(str(DEMO), list(SPECIAL), 4096, EOS)


START_TOKEN = {"type": "token", "token": "<|im_start|>"}
WITH_TOKENS: dict[str, tuple[Any, list[list[str | int]], list[list[str | int]]]] = {
    "trigger": (
        tags(triggers=["<|im_start|>"], tags=[tag("<|im_start|>f ", end=".")]),
        [["x"], ["x", START, "f 12."], [START, "f 1.y", START, "f 2."], ["<|im_start|>f"]],
        [[START], ["x", START, "g 1."], [START, START]],
    ),
    "trigger within a token": (
        tags(triggers=["<|im"], tags=[tag("<|im_start|>f ", end=".")]),
        [[START, "f 12."], ["<|im_start|>f"]],
        [[START, "x"]],
    ),
    "text before it": (
        tags(triggers=["call <|im_start|>"], tags=[tag("call <|im_start|>f ", end=".")]),
        [["x call ", START, "f 1."], ["call"]],
        [["x", START, "f 1."]],
    ),
    "end": (tag("<a>", ANY, "<|im_start|>"), [["<a>x", START]], [["<a><|im_start|>"], ["<a>", START, "x"]]),
    "separator": (
        {"type": "tags_with_separator", "tags": [tag()], "separator": "<|im_start|>"},
        [["<a>1</a>", START, "<a>2</a>"]],
        [["<a>1</a><|im_start|><a>2</a>"], ["<a>1</a>", START]],
    ),
    "constant": ({"type": "const_string", "value": "a<|im_start|>b"}, [["a", START, "b"]], [["a<|im_start|>b"]]),
    "excluded": (tags(excludes=["<|im_start|>", "zz"]), [["z"]], [["zz"], ["z", START]]),
    "token": (
        tag(START_TOKEN, end={"type": "token", "token": START}),
        [[START, "1", START]],
        [["<|im_start|>1", START]],
    ),
    "any tokens": (
        tag("<a>", {"type": "any_tokens", "max_tokens": 2}, START_TOKEN),
        [["<a>", START], ["<a>", 4093 - 1, 4093 - 1, START]],
        [["<a>", 1, 2, 3, START], ["<a>", 4095, START], ["<a>", START, START]],
    ),
    "another token": (
        {"type": "plus", "content": {"type": "exclude_token", "exclude_tokens": ["<|im_start|>", 65]}},
        [[66], [66, 67]],
        [[], [65], [START]],
    ),
    "triggered by tokens": (
        {"type": "token_triggered_tags", "trigger_tokens": [START], "tags": [tag(START_TOKEN, end=".")]},
        [["x"], [], ["x", START, "12.y", START, "1."]],
        [[START], [START, "x"]],
    ),
    "triggered by tokens, at least one": (
        {
            "type": "token_triggered_tags",
            "trigger_tokens": [START],
            "tags": [tag(START_TOKEN, end=".")],
            "at_least_one": True,
        },
        [[START, "1."], [START, "1.x"]],
        [[], ["x", START, "1."]],
    ),
    "rules for tokens": (
        {"type": "token_dispatch", "rules": [["<|im_start|>", INTEGER]], "loop": False},
        [["x"], ["x", START, "12"]],
        [[START], [START, "1 2"]],
    ),
}


@pytest.mark.parametrize("name", WITH_TOKENS)
def test_special_tokens(demo: LLTokenizer, name: str) -> None:
    """A number is a token id. Text never becomes a special token, even if it spells one."""
    form, accepted, refused = WITH_TOKENS[name]
    grammar = converted(form, marker_ids=SPECIAL, added_ids=SPECIAL, eos_token_ids=EOS)
    for parts, is_taken in [*((each, True) for each in accepted), *((each, False) for each in refused)]:
        token_ids = [
            token_id
            for part in parts
            for token_id in ([part] if isinstance(part, int) else [demo.tokenize_str(each)[0] for each in part])
        ]
        assert takes(grammar, demo, token_ids) is is_taken, parts


REFUSED: list[tuple[Any, str]] = [
    ({"type": "qwen_xml_parameter", "json_schema": {}}, "format.type: qwen_xml_parameter cannot be enforced"),
    ({**INTEGER, "style": "qwen_xml"}, "format.style: cannot be enforced; only json can"),
    ({**INTEGER, "any_order": True}, "format.any_order: cannot be enforced; only false can"),
    ({**INTEGER, "excludes": ["a"]}, "format.excludes: cannot be enforced"),
    ({**ANY, "max_tokens": 3}, "format.max_tokens: cannot be enforced; only null can"),
    ({"type": "magic"}, "format.type: is not a known type"),
    ({"type": ["tag"]}, "format.type: is not a known type"),
    ({}, "format.type: is required"),
    ([], "format: must be an object"),
    ({"type": "tag", "begin": "a", "end": "b"}, "format.content: is required"),
    ({**tag(), "stop": 1}, "format: has a field besides begin, content, end, type"),
    (
        tag(content={"type": "or", "elements": [INTEGER, {"type": "or", "elements": []}]}),
        "elements[1].elements: must be a list",
    ),
    (tag(content=ANY, end=""), "format.end: must not be empty"),
    (tags(triggers=["<b"]), "format.tags[0].begin: must begin with exactly one of the triggers"),
    (tags(triggers=["<", "<a"]), "format.tags[0].begin: must begin with exactly one"),
    (tags(triggers=["<", "#"]), "format.triggers[1]: is not the beginning of any tag"),
    (tags(tags=[ANY]), "format.tags[0]: must be a tag"),
    (tags(at_least_one=1), "format.at_least_one: must be true or false"),
    ({"type": "star", "content": ANY}, "format.content: may end in any text"),
    ({"type": "repeat", "min": 2, "max": 1, "content": INTEGER}, "format.min: must be at most max"),
    ({"type": "repeat", "min": True, "max": 1, "content": INTEGER}, "format.min: must be an"),
    ({"type": "sequence", "elements": [ANY, INTEGER]}, "format.elements[1]: follows any text"),
    ({"type": "dispatch", "rules": [["<", ANY]]}, "format.rules[0]: may end in any text"),
    ({"type": "dispatch", "rules": [["<", INTEGER], ["<a", INTEGER]]}, "format.rules[1]: no pattern may begin with"),
    ({"type": "dispatch", "rules": [[7, INTEGER]]}, "format.rules[0]: the pattern must be a string"),
    ({"type": "token", "token": "<tool>"}, "format.token: is not the name of a token"),
    (tag(content={"type": "any_tokens"}), "format.content: what follows any tokens must be a token"),
    ({"type": "json_schema", "json_schema": {"not": {}}}, "not"),
    (tag(content={"type": "grammar", "grammar": "root ::= ["}), "format.content: "),
    (tag(content={"type": "grammar", "grammar": 'start: "a'}), ""),
    ({"type": "regex", "pattern": "(?=a)"}, "look-around"),
    *(
        (form, "half of a surrogate pair")
        for half in ("\ud800", "\udfffx")
        for form in (tag(begin=half), {"type": "regex", "pattern": half}, {**INTEGER, "json_schema": {"const": half}})
    ),
]


@pytest.mark.parametrize(("form", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused_with_the_place(form: Any, message: str) -> None:
    text = json.dumps({"type": "structural_tag", "format": form})
    with pytest.raises(GrammarError) as refused:
        compile_grammar(BYTES, to_grammar("structural_tag_json", text))
    assert message in discreet(str(refused.value), text)


def test_nothing_may_occur_zero_times() -> None:
    for content in (INTEGER, {"type": "const_string", "value": "x"}):
        form = {"type": "sequence", "elements": [tag(), {"type": "repeat", "min": 0, "max": 0, "content": content}]}
        grammar = converted(form)
        assert takes(grammar, BYTES, list(b"<a>1</a>"))
        assert not takes(grammar, BYTES, list(b"<a>1</a>x"))
    assert takes(converted({"type": "any_tokens", "max_tokens": 0}), BYTES, [])


def test_pairs_of_surrogates_are_characters() -> None:
    grammar = converted({"type": "const_string", "value": "\U0001f600\\ud800"})
    assert takes(grammar, BYTES, list("\U0001f600\\ud800".encode()))


WHOLE = [
    ("[]", "must be an object"),
    ("{", "is not JSON"),
    ("{}", "format: is required"),
    ('{"type": "other", "format": {}}', "type: must be structural_tag"),
    ('{"structures": [], "triggers": ["<"]}', "structures: must be a list that is not empty"),
    ('{"structures": [{"begin": "<a", "schema": {}, "end": ""}]}', "triggers: must be a list"),
    (
        '{"structures": [{"begin": "<a", "schema": "{", "end": ""}], "triggers": ["<"]}',
        "structures[0].schema: is not JSON",
    ),
    ('{"structures": [{"begin": "<a", "end": ""}], "triggers": ["<"]}', "structures[0].schema: must be a JSON schema"),
    ('{"format": ' + '{"type":"optional","content":' * 50_000 + "1" + "}" * 50_001, "nested too deeply"),
]


@pytest.mark.parametrize(("text", "message"), WHOLE, ids=range(len(WHOLE)))
def test_what_is_no_tag(text: str, message: str) -> None:
    with pytest.raises(GrammarError) as refused:
        to_grammar("structural_tag_json", text)
    assert message in discreet(str(refused.value), text)


def test_64_levels() -> None:
    form: dict[str, Any] = {"type": "const_string", "value": "x"}
    for _ in range(MAX_LEVELS - 1):
        form = tag(content=form)
    assert takes(converted(form), BYTES, list(("<a>" * 63 + "x" + "</a>" * 63).encode()))
    with pytest.raises(GrammarError, match="nested more than 64 levels"):
        converted(tag(content=form))


def test_errors_repeat_no_words_of_the_caller() -> None:
    text = json.dumps({"type": "structural_tag", "format": {"type": "secretword", "secretfield": 1}})
    with pytest.raises(GrammarError) as refused:
        to_grammar("structural_tag_json", text)
    assert "secret" not in discreet(str(refused.value), text)


def test_random_tags_are_converted_or_refused() -> None:
    """Returns tags in which a part is replaced, dropped or doubled."""
    rng = random.Random(1)
    values: list[Any] = [None, True, -1, 2**40, 1.5, "", "<", "x" * 300, [], {}, [[]], INTEGER, ANY, tag(), tags()]
    num_valid = 0
    for _ in range(400):
        whole = json.loads(json.dumps(rng.choice(CASES)["tag"]))
        for _ in range(rng.choice((1, 1, 2, 3))):
            _mutate(rng, whole, values)
        try:
            grammar = to_grammar("structural_tag_json", json.dumps(whole), SPECIAL, added_ids=SPECIAL)
        except GrammarError:
            continue
        problem = LLMatcher.validate_grammar(grammar, BYTES)
        num_valid += not problem
        assert not any(word in problem for word in ("xpect", "lexer error", "unknown name")), "its syntax is right"
    assert num_valid > 20


def _mutate(rng: random.Random, whole: Any, values: list[Any]) -> None:
    place = whole
    while isinstance(place, dict | list) and place:
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        if rng.random() < 0.4 or not isinstance(place[key], dict | list):
            if rng.random() < 0.3:
                del place[key]
            else:
                place[key] = json.loads(json.dumps(rng.choice(values)))
            return
        place = place[key]

"""What becomes of schemas before they are compiled: by the texts that the grammars take."""

import json
from concurrent.futures import Future

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.models.batch.grammar_matcher import MESSAGES, CompiledGrammar, GrammarMatcher
from penstock.models.structured_output.compiler import GrammarError, to_grammar
from penstock.models.structured_output.exact_numbers import integers_between
from penstock.scheduler.plan import RowFailure

BYTES = LLTokenizer("byte")
P = 2**53 + 1
ONE = {"type": "integer", "minimum": 0, "maximum": 9}
A, B = {"properties": {"a": ONE}}, {"properties": {"b": ONE}}


def grammar_of(schema, **options):
    return to_grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema), **options)


def takes(grammar, text):
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


def check(grammar, good, bad):
    assert {text: takes(grammar, text) for text in good} == dict.fromkeys(good, True)
    assert {text: takes(grammar, text) for text in bad} == dict.fromkeys(bad, False)


EXACT = {
    "const": ({"const": P}, [str(P)], [str(P - 1), str(P + 1)]),
    "a negative const": ({"const": -(2**63) + 1}, [str(-(2**63) + 1)], [str(-(2**63))]),
    "enum": ({"enum": [P, "a", None]}, [str(P), '"a"', "null"], [str(P - 1)]),
    "enum of a type": ({"type": "integer", "enum": [P, "a"]}, [str(P)], ['"a"']),
    "bounds": ({"type": "integer", "minimum": P, "maximum": P + 2}, [str(P), str(P + 2)], [str(P - 1), str(P + 3)]),
    "int64": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        [str(-(2**63)), str(2**63 - 1), "0", "-1"],
        [str(-(2**63) - 1), str(2**63), "-0", "01"],
    ),
    "uint64 or null": (
        {"type": ["integer", "null"], "minimum": 0, "maximum": 2**64 - 1},
        [str(2**64 - 1), "0", "null"],
        [str(2**64), "-1"],
    ),
    "a property": (
        {
            "properties": {"a": {"type": "integer", "exclusiveMaximum": 2**60}, "b": {"type": "string"}},
            "required": ["a"],
        },
        [f'{{"a": {2**60 - 1}}}', '{"a":1, "b":"x"}', '{\n  "a": 1\n}'],
        [f'{{"a":{2**60}}}', '{"b":"x"}', '{"a":1,"c":2}', '{"a":   1}'],
    ),
    "an optional property": (
        {"type": "object", "properties": {"a": {"const": P}, "b": {"type": "string"}}},
        ["{}", '{"b":"x"}', f'{{"a":{P},"b":""}}'],
        ['{"a":1}', f'{{"b":"","a":{P}}}'],
    ),
    "others beside it": (
        {"type": "object", "properties": {"a": {"const": P}}, "additionalProperties": True, "required": ["a"]},
        [f'{{"a":{P},"z":[1]}}', f'{{"a":{P}}}'],
        ['{"a":1}', f'{{"a":{P},"a":1}}'],
    ),
    "items of $defs": (
        {"type": "array", "items": {"$ref": "#/$defs/i"}, "minItems": 1, "maxItems": 2, "$defs": {"i": {"const": P}}},
        [f"[{P}]", f"[{P}, {P}]"],
        ["[]", "[1]", f"[{P},{P},{P}]"],
    ),
    "a recursive schema": (
        {"properties": {"n": {"const": P}, "c": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["n", "c"]},
        [f'{{"n":{P},"c":{{"n":{P},"c":null}}}}'],
        [f'{{"n":{P}}}'],
    ),
    "anyOf": ({"anyOf": [{"const": P}, {"type": "boolean"}]}, ["true", str(P)], ["1"]),
    "inside a const": ({"const": {"a": [P, 1.5]}}, [f'{{"a":[{P}, 1.5]}}'], ['{"a":[1,1.5]}']),
    "no double": ('{"enum":[1e400, 9007199254740993.0]}', ["1e400", "9007199254740993.0"], ["1"]),
    "a double of 2^53 once rounded": ('{"const":9007199254740993.0}', ["9007199254740993.0"], ["9007199254740992"]),
    "a default": ({"default": 2**70, "type": "integer", "minimum": 0}, ["5"], ["-1"]),
}


@pytest.mark.parametrize("case", EXACT)
def test_large_numbers_are_exact(case):
    schema, good, bad = EXACT[case]
    check(grammar_of(schema), good, bad)
    text = schema if isinstance(schema, str) else json.dumps(schema)
    in_lark = to_grammar("lark", f'start: "%json {{}}" %json {text} ";" // %json {{}}')
    check(in_lark, [f"%json {{}}{each};" for each in good], [f"%json {{}}{each};" for each in bad])


REFUSED = {
    "/maximum:": {"type": "number", "maximum": P},
    "/multipleOf:": {"type": "integer", "multipleOf": P},
    "/patternProperties/a/const:": {"type": "object", "patternProperties": {"a": {"const": P}}},
    "/allOf/0/const:": {"allOf": [{"const": P}, {"type": "integer"}]},
    "/$defs/x/oneOf/0/const:": {"$defs": {"x": {"oneOf": [{"const": P}]}}, "$ref": "#/$defs/x"},
    "/properties/a/minimum:": {"type": "object", "properties": {"a": {"minimum": P}}},
    "no integer": {"type": "integer", "minimum": P + 1, "maximum": P},
    "more than 400 digits": {"const": 10**500},
}


@pytest.mark.parametrize("where", REFUSED)
def test_other_large_numbers_are_refused_where_they_are(where):
    with pytest.raises(GrammarError, match=f"^(is not JSON: a number has )?(/?: )?{where.replace('$', '.')}|{where}"):
        grammar_of(REFUSED[where])


def test_a_bound_that_is_no_double_is_refused():
    with pytest.raises(GrammarError, match=r"^/maximum: "):
        grammar_of('{"type": "integer", "maximum": 1e400}')


@pytest.mark.parametrize("low", [None, -120, -7, 0, 5, 99])
@pytest.mark.parametrize("high", [None, -100, -1, 0, 8, 100, 1203])
def test_integers_between(low, high):
    if low is not None and high is not None and low > high:
        return
    grammar = f"start: /{integers_between(low, high)}/"
    for number in (*range(-130, 130), 1202, 1203, 1204, -5000, 5000):
        is_between = (low is None or number >= low) and (high is None or number <= high)
        assert takes(grammar, str(number)) == is_between
    assert not takes(grammar, "-0")


BASE = {"$defs": {"Base": {**A, "required": ["a"]}}}
CLOSED = {
    "properties": (A, ['{"a":1}', "{}"], ['{"b":1}']),
    "nested": ({"properties": {"x": A}}, ['{"x":{"a":1}}'], ['{"x":{"b":1}}']),
    "items": ({"type": "array", "items": A}, ['[{"a":1}]'], ['[{"b":1}]']),
    "a definition": ({"anyOf": [{"$ref": "#/$defs/Base"}, {"type": "null"}], **BASE}, ['{"a":1}', "null"], ['{"b":1}']),
    "allOf": ({"allOf": [A, B], "required": ["a", "b"]}, ['{"a":1,"b":1}'], ['{"a":1,"b":1,"c":1}']),
    "a base": (
        {"allOf": [{"$ref": "#/$defs/Base"}, {**B, "required": ["b"]}], **BASE},
        ['{"a":1,"b":1}'],
        ['{"a":1}', '{"a":1,"b":1,"c":1}'],
    ),
    "beside a base": ({"$ref": "#/$defs/Base", **B, **BASE}, ['{"a":1}'], ['{"a":1,"c":1}']),
    "anyOf": (
        {"anyOf": [{**A, "required": ["a"]}, {**B, "required": ["b"]}]},
        ['{"a":1}', '{"b":1}'],
        ['{"a":1,"b":1}'],
    ),
    "beside anyOf": (
        {"properties": {"k": ONE}, "required": ["k"], "anyOf": [{**A, "required": ["a"]}, {**B, "required": ["b"]}]},
        ['{"k":1,"a":1}', '{"k":1,"b":1}'],
        ['{"k":1,"a":1,"c":1}', '{"k":1,"a":1,"b":1}'],
    ),
    "required in anyOf": (
        {"properties": {"a": ONE, "b": ONE}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
        ["{}", '{"a":1,"c":2}'],
    ),
    "patternProperties": ({**A, "patternProperties": {"^x": ONE}}, ['{"a":1,"xy":2}'], ['{"a":1,"y":2}']),
    "a recursive schema": (
        {
            "$ref": "#/$defs/n",
            "$defs": {"n": {"properties": {"a": ONE, "n": {"$ref": "#/$defs/n"}}, "required": ["a"]}},
        },
        ['{"a":1,"n":{"a":2}}'],
        ['{"a":1,"z":1}'],
    ),
}


@pytest.mark.parametrize("case", CLOSED)
def test_objects_have_the_properties_that_they_declare(case):
    schema, good, bad = CLOSED[case]
    check(grammar_of(schema), good, bad)


@pytest.mark.parametrize(
    "schema",
    [
        {}, {"type": "object"}, {"type": "object", "properties": {}}, {"required": ["z"]},
        {"type": "object", "minProperties": 1}, {**A, "additionalProperties": True}, {**A, "additionalProperties": ONE},
        {"allOf": [{**A, "additionalProperties": True}, B]},
    ],
)  # fmt: skip
def test_others_stay_open(schema):
    assert takes(grammar_of(schema), '{"z":1}')


def test_a_service_may_leave_them_open():
    assert takes(grammar_of(A, closes_objects=False), '{"a":1,"z":1}')
    assert not takes(grammar_of({**A, "additionalProperties": False}, closes_objects=False), '{"a":1,"z":1}')


STRICT = {"type": "object", "additionalProperties": False}
COVERED = {
    "the property": ({**STRICT, **A, "required": ["a"], "patternProperties": {"^a$": ONE}}, '{"a": 5'),
    "a required name": ({**STRICT, "required": ["ab"], "patternProperties": {"^ab$": ONE}}, '{"ab": 5'),
    "both properties": (
        {**STRICT, "properties": {"a": ONE, "b": ONE}, "patternProperties": {"^[ab]$": ONE}}, '{"a":1,"b":2'
    ),
    "an empty name": ({**STRICT, "properties": {"": ONE}, "patternProperties": {"^$": ONE}}, '{"":1'),
    "in $defs": (
        {"$ref": "#/$defs/x", "$defs": {"x": {**STRICT, **A, "required": ["a"], "patternProperties": {"^a$": ONE}}}},
        '{"a": 5',
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COVERED)
def test_no_comma_comes_where_no_name_can_follow(case):
    schema, text = COVERED[case]
    grammar = grammar_of(schema)
    assert takes(grammar, text + "}")
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    matcher.consume_tokens(list(text.encode()))
    assert not int.from_bytes(matcher.compute_bitmask(), "little") >> ord(",") & 1


def test_a_pattern_that_covers_a_property_still_holds_for_it():
    schema = {**STRICT, "properties": {"a": {"type": "integer"}}, "patternProperties": {"^a$": {"minimum": 3}}}
    check(grammar_of(schema), ['{"a":3}'], ['{"a":2}'])


def test_a_pattern_with_other_names_stays():
    schema = {**STRICT, **A, "patternProperties": {"^a": ONE}}
    check(grammar_of(schema), ['{"a":1,"ab":2}'], ['{"b":1}'])


def test_a_dead_end_is_distinguished_from_a_too_costly_grammar():
    dead = LLMatcher(BYTES, 'start: "a" ("b" C)?\nC: /c/ & ~/c/', log_level=0)
    few = LLParserLimits(max_items_in_row=1)
    costly = LLMatcher(BYTES, 'start: "a" (x | y)\nx: "b" x | "b"\ny: "b" y | "c"', log_level=0, limits=few)
    for compiled, kind in ((dead, RowFailure.DEAD_END), (costly, RowFailure.COSTLY)):
        known: Future[LLMatcher] = Future()
        known.set_result(compiled)
        row = GrammarMatcher(CompiledGrammar(known), 0, 256)
        matcher = row.at(list(b"ab"), 2)
        if matcher is not None:
            matcher.compute_bitmask()
            row.fail(2)
        assert (row.failure, row.failure_kind) == (MESSAGES[kind], kind)

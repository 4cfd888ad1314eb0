"""Schemas of tools that a format's grammar cannot express, or that are made to be expensive."""

import re
from typing import Any

import pytest

from penstock.service.parsers.lark_grammar import AnswerShape, CallableTool, CannotBeHeld
from penstock.service.parsers.tool_grammar import call_grammar

NAMED = '[TOOL_CALLS]probe_tool[CALL_ID]probecall[ARGS]{"probe": "value"}'


@pytest.mark.parametrize(
    ("form", "tool", "said"),
    [
        ("pythonic", CallableTool("f", {"properties": {"from": {}}}), "'from'"),
        ("pythonic", CallableTool("f", {"properties": {"a b": {}}}), "'a b'"),
        ("pythonic", CallableTool("f", {"properties": {"ﬁ": {}}}), "'ﬁ'"),
        ("pythonic", CallableTool("f", {"anyOf": []}), "anyOf"),
        ("pythonic", CallableTool("f g", None), "'f g'"),
        ("mistral", CallableTool("f g", None), "'f g'"),
        ("qwen3_coder", CallableTool("f>", None), "'f>'"),
        ("qwen3_coder", CallableTool("f", {"properties": {"a>": {}}}), "'a>'"),
        ("glm45", CallableTool("f", {"properties": {"a": {"pattern": "a|^b", "type": "string"}}}), "pattern"),
        ("minimax_m2", CallableTool("f", {"properties": {"a": {"enum": ["</parameter>"]}}}), "enum"),
        ("gemma4", CallableTool("f", {"properties": {"a:b": {}}}), "'a:b'"),
        ("gemma4", CallableTool("f", {"properties": {"a": {"$ref": "#/$defs/x"}}}), "#/$defs/x"),
        ("gemma4", CallableTool("f", {"properties": {"a": {"anyOf": 5}}}), "anyOf"),
        ("qwen3_coder", CallableTool("f", {"properties": {"a": {"enum": "a"}}}), "enum"),
        ("pythonic", CallableTool("f", {"required": [{}]}), "required"),
        ("gemma4", CallableTool("f", {"properties": {"a": {"type": "array", "minItems": True}}}), "minItems"),
        ("glm45", CallableTool("f", {"properties": {"a": {"pattern": 5}}}), "pattern"),
        ("gemma4", CallableTool("f", {"properties": []}), "properties"),
    ],
)
def test_tools_that_a_format_cannot_express_are_reported(form, tool, said):
    with pytest.raises(CannotBeHeld, match=re.escape(said)):
        call_grammar(form, [tool], one=True, shape=AnswerShape(NAMED))


def nested(depth, outer):
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = outer(schema)
    return CallableTool("f", {"properties": {"a": schema}})


WRAPPERS = {
    "arrays": lambda schema: {"type": "array", "items": schema},
    "objects": lambda schema: {"type": "object", "properties": {"a": schema}},
    "alternatives": lambda schema: {"anyOf": [schema, {"type": "null"}]},
}
translated = pytest.mark.parametrize("form", ["pythonic", "qwen3_coder", "glm45", "minimax_m2", "gemma4"])


@translated
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_deep_schema_makes_a_short_grammar_or_is_refused(form, wrap):
    assert len(call_grammar(form, [nested(40, wrap)], one=True, shape=AnswerShape())) < 20_000
    with pytest.raises(CannotBeHeld, match="nested"):
        call_grammar(form, [nested(5000, wrap)], one=True, shape=AnswerShape())


def test_a_long_chain_of_references_is_followed():
    links: dict[str, Any] = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(2000)}
    links["d2000"] = {"type": "string"}
    tool = CallableTool("f", {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": links})
    assert "start:" in call_grammar("gemma4", [tool], one=True, shape=AnswerShape())


@pytest.mark.parametrize("form", ["pythonic", "qwen3_coder"])
def test_definitions_that_every_argument_refers_to_are_limited(form):
    definitions = {"d": {"type": "integer", "description": "x" * 100_000}}
    properties = {f"a{at}": {"$ref": "#/$defs/d"} for at in range(1000)}
    with pytest.raises(CannotBeHeld, match="too long"):
        call_grammar(
            form, [CallableTool("f", {"properties": properties, "$defs": definitions})], one=True, shape=AnswerShape()
        )

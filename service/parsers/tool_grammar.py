"""Lark grammars that constrain an answer to a format's tool calls. Independent of requests."""

import json
import re
from collections.abc import Callable, Sequence

from penstock.service.parsers.family_grammars import FAMILY_SYNTAXES, add_harmony_text
from penstock.service.parsers.harmony import HARMONY
from penstock.service.parsers.lark_grammar import (
    AnswerShape,
    CallableTool,
    CallSyntax,
    CannotBeHeld,
    LarkGrammar,
    argument_schemas,
    check_name,
    check_schema,
    escaped,
    json_rule,
    quoted,
)
from penstock.service.parsers.pythonic import is_argument_name
from penstock.service.parsers.reasoning import REASONING_FORMATS


def call_grammar(tool_format: str, tools: Sequence[CallableTool], *, one: bool, shape: AnswerShape) -> str:
    """Returns a grammar of only calls; with ``one``, of a single call. Reasoning may precede them if the model's
    answers have it, and must if the prompt has opened it. Raises CannotBeHeld."""
    lark = LarkGrammar(shape)
    syntax = _syntax_of(tool_format, lark)
    more = "" if one or syntax.between is None else f" ({syntax.between} marked)*"
    lark.add_rules(f"start: {lark.before}marked{more}", f"marked: {lark.marker(syntax.marker)} group")
    return lark.with_calls(syntax, tools, one=one)


def text_grammar(tool_format: str, tools: Sequence[CallableTool], *, one: bool, shape: AnswerShape) -> str:
    """Returns a grammar of any text in which calls follow their marker and are of these tools; with ``one``, at most
    one. The format is one of MARKED_FORMATS. Raises CannotBeHeld."""
    lark = LarkGrammar(shape)
    syntax = _syntax_of(tool_format, lark)
    if tool_format == HARMONY:
        add_harmony_text(lark)
        lark.add_rules(f"marked: {lark.marker(syntax.marker)} group")
        return lark.with_calls(syntax, tools, one=True)
    lark.add_rules(f"start: {lark.before}marked{'?' if one else '*'} text")
    lark.add_rules("marked: before_call group", "text: /(?s:.*)/")
    if syntax.marker in shape.marker_ids:
        lark.add_rules(f"before_call: text {lark.marker(syntax.marker)}")
    else:  # lazy: the text ends as soon as the marker appears
        opens = None if shape.reasoning is None else REASONING_FORMATS[shape.reasoning].opens
        thinks = "" if opens is None or lark.has_tokens(opens) else rf" & ~/\s*{escaped(opens)}(?s:.*)/"
        lark.add_rules("before_call[lazy]: BEFORE_CALL", f"BEFORE_CALL: /(?s:.*){escaped(syntax.marker)}/{thinks}")
    return lark.with_calls(syntax, tools, one=one)


def _object(key: str) -> Callable[[LarkGrammar, str, CallableTool], str]:
    """{"name": ..., key: {...}}"""

    def write(lark: LarkGrammar, rule: str, tool: CallableTool) -> str:
        begin = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
        return f'{quoted(begin)} {json_rule(tool.parameters)} "}}"'

    return write


def _named_call(has_id: bool, has_args: bool) -> Callable[[LarkGrammar, str, CallableTool], str]:
    """name[CALL_ID]...[ARGS]{...}, the syntax of Mistral's later models."""

    def write(lark: LarkGrammar, rule: str, tool: CallableTool) -> str:
        check_name(tool)
        call_id = f"{lark.marker('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/ " if has_id else ""
        marker = f"{lark.marker('[ARGS]')} " if has_args else ""
        return f"{quoted(tool.name)} {call_id}{marker}{json_rule(tool.parameters)}"

    return write


def _syntax_of(tool_format: str, lark: LarkGrammar) -> CallSyntax:
    if tool_format in FAMILY_SYNTAXES:
        return FAMILY_SYNTAXES[tool_format](lark)
    if tool_format == "hermes":
        begin, end = quoted("\n"), lark.marker("\n</tool_call>")
        return CallSyntax(_object("arguments"), "<tool_call>", opens=begin, closes=end, between=quoted("\n"))
    if tool_format != "mistral":
        return _SYNTAXES[tool_format]
    named = re.search(r"\[TOOL_CALLS\]\s*probe_tool[^{]*", lark.shape.shown_call)
    if named is None:
        return CallSyntax(
            _object("arguments"), "[TOOL_CALLS]", opens='/ ?/ "["', next_call=quoted(", "), closes=quoted("]")
        )
    return CallSyntax(_named_call("[CALL_ID]" in named[0], "[ARGS]" in named[0]), "[TOOL_CALLS]", between="")


def _python_call(lark: LarkGrammar, rule: str, tool: CallableTool) -> str:
    """name(argument=value, ...), with JSON values in Python's syntax. The arguments are in the order of the schema's
    properties."""
    check_name(tool)
    check_schema(tool)
    after, first = '""', '""'  # what may follow after an argument, and at the beginning
    for index, (name, held, is_required) in reversed(list(enumerate(argument_schemas(tool)))):
        if not is_argument_name(name):
            raise CannotBeHeld(f"{name!r} of {tool.name} is not a valid argument name in this model's format")
        argument = f"{rule}_{index}"
        is_optional = not is_required
        lark.add_rules(f"{argument}: {quoted(f'{name}=')} {json_rule(held)}")
        lark.add_rules(f"{argument}_first: {argument} {after}" + f" | {first}" * is_optional)
        lark.add_rules(f"{argument}_after: {quoted(', ')} {argument} {after}" + f" | {after}" * is_optional)
        first, after = f"{argument}_first", f"{argument}_after"
    return f"{quoted(f'{tool.name}(')} {first} {quoted(')')}"


_SYNTAXES = {
    "llama3_json": CallSyntax(_object("parameters"), between=quoted("; ")),
    "pythonic": CallSyntax(_python_call, opens=quoted("["), next_call=quoted(", "), closes=quoted("]")),
}
"""The syntax of each format whose syntax does not depend on the model."""
MARKED_FORMATS = frozenset({"hermes", "mistral", *FAMILY_SYNTAXES})
"""Formats whose calls may be anywhere in an answer, since a marker distinguishes them from text."""

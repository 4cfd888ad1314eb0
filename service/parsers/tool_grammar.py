"""Lark grammars that constrain an answer to a format's tool calls. Independent of requests."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.service.parsers.pythonic import is_argument_name
from penstock.service.parsers.reasoning import REASONING_FORMATS

Schema = Mapping[str, Any]


class CannotBeHeld(Exception):
    """A tool that a format's grammar cannot describe. The text has the reason."""


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool in a grammar."""

    name: str
    parameters: Schema | None
    """The schema of the arguments; None: any object."""


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """The form of a model's answers, besides its calls."""

    shown_call: str = ""
    """A conversation with a call of ``probe_tool``, as the chat template writes it: formats have variants."""
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """Ids of markers that are special tokens of the model; all others are text."""
    reasoning: str | None = None
    in_reasoning: bool = False
    """Whether the prompt has opened the reasoning."""


def call_grammar(tool_format: str, tools: Sequence[CallableTool], *, one: bool, shape: AnswerShape) -> str:
    """Returns a grammar of only calls; with ``one``, of a single call. Reasoning may precede them if the model's
    answers have it, and must if the prompt has opened it. Raises CannotBeHeld."""
    lark = _Lark(shape)
    writing = _writing(tool_format, shape)
    more = "" if one or writing.between is None else f" ({writing.between} marked)*"
    lark.add_rules(f"start: {lark.before}marked{more}", f"marked: {lark.marker(writing.marker)} group")
    return lark.with_calls(writing, tools, one=one)


def text_grammar(tool_format: str, tools: Sequence[CallableTool], *, one: bool, shape: AnswerShape) -> str:
    """Returns a grammar of any text in which calls follow their marker and are of these tools; with ``one``, at most
    one. The format is one of MARKED_FORMATS. Raises CannotBeHeld."""
    lark = _Lark(shape)
    writing = _writing(tool_format, shape)
    lark.add_rules(f"start: {lark.before}marked{'?' if one else '*'} text")
    lark.add_rules("marked: before_call group", "text: /(?s:.*)/")
    if writing.marker in shape.special_tokens:
        lark.add_rules(f"before_call: text {lark.marker(writing.marker)}")
    else:  # lazy: the text ends as soon as the marker appears
        opens = None if shape.reasoning is None else REASONING_FORMATS[shape.reasoning].opens
        thinks = "" if opens is None or opens in shape.special_tokens else rf" & ~/\s*{_escaped(opens)}(?s:.*)/"
        lark.add_rules("before_call[lazy]: BEFORE_CALL", f"BEFORE_CALL: /(?s:.*){_escaped(writing.marker)}/{thinks}")
    return lark.with_calls(writing, tools, one=one)


@dataclass(frozen=True, slots=True)
class _Writing:
    """The syntax of a format's calls, as Lark expressions. A group of calls follows each marker."""

    call: Callable[["_Lark", str, CallableTool], str]
    """Returns the body of a rule from the rule's name and a tool."""
    marker: str = ""
    opens: str = ""
    next_call: str | None = None
    """The separator of calls in a group; None: a group has one call."""
    closes: str = ""
    between: str | None = None
    """The separator of groups; None: there is one group."""


class _Lark:
    """A grammar under construction."""

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape
        self._rules: list[str] = []
        self.before = ""
        """The expression before an answer."""
        if shape.reasoning is not None:
            self.before = "thought space " if shape.in_reasoning else "(thought space)? "
            self._add_thought(shape.reasoning)

    def add_rules(self, *rules: str) -> None:
        self._rules += rules

    def marker(self, text: str) -> str:
        """Returns a marker's expression, as a special token or as text."""
        token_id = self._shape.special_tokens.get(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def with_calls(self, writing: _Writing, tools: Sequence[CallableTool], *, one: bool) -> str:
        """Returns the whole grammar, with the rules for a group of calls."""
        names = [f"call_{index}" for index in range(len(tools))]
        more = "" if one or writing.next_call is None else f" ({writing.next_call} call)*"
        self.add_rules(f"group: {writing.opens} call{more} {writing.closes}", f"call: {' | '.join(names)}")
        for name, tool in zip(names, tools, strict=True):
            self.add_rules(f"{name}: {writing.call(self, name, tool)}")
        return "\n".join(self._rules)

    def _add_thought(self, reasoning: str) -> None:
        form, specials = REASONING_FORMATS[reasoning], self._shape.special_tokens
        if form.closes in specials:
            opens = "" if self._shape.in_reasoning else self.marker(form.opens)
            self.add_rules(f"thought: {opens} THOUGHT? {self.marker(form.closes)}", "THOUGHT: /(?s:.+)/")
        else:
            opens = "" if self._shape.in_reasoning else rf"[ \n]{{0,2}}{_escaped(form.opens)}"
            self.add_rules(f"thought[lazy]: /{opens}(?s:.*){_escaped(form.closes)}/")
        self.add_rules(r"space: /[ \n]{0,2}/")


def _json(schema: Schema | None) -> str:
    """Returns the expression of a JSON value, without optional white space: weak models may write it without end."""
    held: dict[str, Any] = dict(schema or {"type": "object"})
    held["x-guidance"] = {"whitespace_pattern": " ?"} | dict(held.get("x-guidance") or {})
    return f"%json {json.dumps(held, ensure_ascii=False)}"


def _object(key: str) -> Callable[[_Lark, str, CallableTool], str]:
    """{"name": ..., key: {...}}"""

    def write(lark: _Lark, rule: str, tool: CallableTool) -> str:
        begin = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
        return f'{quoted(begin)} {_json(tool.parameters)} "}}"'

    return write


def _named_call(has_id: bool, has_args: bool) -> Callable[[_Lark, str, CallableTool], str]:
    """name[CALL_ID]...[ARGS]{...}, the syntax of Mistral's later models."""

    def write(lark: _Lark, rule: str, tool: CallableTool) -> str:
        _check_name(tool)
        call_id = f"{lark.marker('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/ " if has_id else ""
        marker = f"{lark.marker('[ARGS]')} " if has_args else ""
        return f"{quoted(tool.name)} {call_id}{marker}{_json(tool.parameters)}"

    return write


def _writing(tool_format: str, shape: AnswerShape) -> _Writing:
    if tool_format != "mistral":
        return _WRITINGS[tool_format]
    named = re.search(r"\[TOOL_CALLS\]\s*probe_tool[^{]*", shape.shown_call)
    if named is None:
        return _Writing(
            _object("arguments"), "[TOOL_CALLS]", opens='/ ?/ "["', next_call=quoted(", "), closes=quoted("]")
        )
    return _Writing(_named_call("[CALL_ID]" in named[0], "[ARGS]" in named[0]), "[TOOL_CALLS]", between="")


def _python_call(lark: _Lark, rule: str, tool: CallableTool) -> str:
    """name(argument=value, ...), with JSON values in Python's syntax. The arguments are in the order of the schema's
    properties."""
    _check_name(tool)
    schema = tool.parameters or {}
    unknown = set(schema) - _HELD_KEYS
    if unknown or not isinstance(schema.get("properties", {}), Mapping):
        properties_named = " and ".join(sorted(unknown)) or "properties"
        raise CannotBeHeld(
            f"the parameters of {tool.name} have {properties_named}, which cannot be enforced in this model's format"
        )
    known = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = set(schema.get("required") or ())
    properties = dict(schema.get("properties") or {}) | {
        name: {} for name in required if name not in schema.get("properties", {})
    }
    after, first = '""', '""'  # what may follow after an argument, and at the beginning
    for index, (name, value) in reversed(list(enumerate(properties.items()))):
        if not is_argument_name(name):
            raise CannotBeHeld(f"{name!r} of {tool.name} is not a valid argument name in this model's format")
        argument = f"{rule}_{index}"
        held = {**known, **(value if isinstance(value, Mapping) else {"allOf": [value]})}
        is_optional = name not in required
        lark.add_rules(f"{argument}: {quoted(f'{name}=')} {_json(held)}")
        lark.add_rules(f"{argument}_first: {argument} {after}" + f" | {first}" * is_optional)
        lark.add_rules(f"{argument}_after: {quoted(', ')} {argument} {after}" + f" | {after}" * is_optional)
        first, after = f"{argument}_first", f"{argument}_after"
    return f"{quoted(f'{tool.name}(')} {first} {quoted(')')}"


_HELD_KEYS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
    | {"title", "description", "$schema", "$id", "examples", "strict"}
)
"""Keys that a schema of arguments may have besides its properties, if each argument is constrained separately."""


def _check_name(tool: CallableTool) -> None:
    if re.fullmatch(r"[\w.:-]+", tool.name) is None:
        raise CannotBeHeld(f"{tool.name!r} is not a valid function name in this model's format")


def _escaped(text: str) -> str:
    """Escapes a text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")


def quoted(text: str) -> str:
    """Returns a text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


_WRITINGS = {
    "hermes": _Writing(
        _object("arguments"), "<tool_call>", opens=quoted("\n"), closes=quoted("\n</tool_call>"), between=quoted("\n")
    ),
    "llama3_json": _Writing(_object("parameters"), between=quoted("; ")),
    "pythonic": _Writing(_python_call, opens=quoted("["), next_call=quoted(", "), closes=quoted("]")),
}
"""The syntax of each format except Mistral's."""
MARKED_FORMATS = frozenset({"hermes", "mistral"})
"""Formats whose calls may be anywhere in an answer, since a marker distinguishes them from text."""

"""Parts of Lark grammars of answers with tool calls: rules, markers and JSON values."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.service.parsers.base import Schema
from penstock.service.parsers.reasoning import REASONING_FORMATS, ReasoningFormat

_MAX_CHARS = 16 << 20
"""The limit on a grammar's length, in characters."""


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
    marker_ids: Mapping[str, int] = field(default_factory=dict)
    """Ids of the markers that are tokens of the model; all others are text."""
    reasoning: str | None = None
    in_reasoning: bool = False
    """Whether the prompt has opened the reasoning."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The syntax of a format's calls, as Lark expressions. A group of calls follows each marker."""

    call: Callable[["LarkGrammar", str, CallableTool], str]
    """Returns the body of a rule from the rule's name and a tool."""
    marker: str = ""
    opens: str = ""
    next_call: str | None = None
    """The separator of calls in a group; None: a group has one call."""
    closes: str = ""
    between: str | None = None
    """The separator of groups; None: there is one group."""


class LarkGrammar:
    """A grammar under construction."""

    def __init__(self, shape: AnswerShape) -> None:
        self.shape = shape
        self._rules: list[str] = []
        self._num_chars = 0
        self.before = ""
        """The expression before an answer."""
        if shape.reasoning is not None:
            self.before = "thought space " if shape.in_reasoning else "(thought space)? "
            self._add_thought(REASONING_FORMATS[shape.reasoning])

    def add_rules(self, *rules: str) -> None:
        """Adds rules. Raises CannotBeHeld if they are too long: each argument has a copy of its schema's ``$defs``."""
        self._num_chars += sum(map(len, rules))
        if self._num_chars > _MAX_CHARS:
            raise CannotBeHeld("the tools' schemas are too long to be enforced; shorten them, or their $defs")
        self._rules += rules

    def marker(self, text: str) -> str:
        """Returns the expression of a text of markers, each as a token or as text."""
        return marker_expression(text, self.shape.marker_ids)

    def has_tokens(self, text: str) -> bool:
        """Whether a text has markers that are tokens."""
        return any(token in text for token in self.shape.marker_ids)

    def with_calls(self, syntax: CallSyntax, tools: Sequence[CallableTool], *, one: bool) -> str:
        """Returns the whole grammar, with the rules for a group of calls."""
        names = [f"call_{index}" for index in range(len(tools))]
        more = "" if one or syntax.next_call is None else f" ({syntax.next_call} call)*"
        self.add_rules(f"group: {syntax.opens} call{more} {syntax.closes}", f"call: {' | '.join(names)}")
        for name, tool in zip(names, tools, strict=True):
            self.add_rules(f"{name}: {syntax.call(self, name, tool)}")
        return "\n".join(self._rules)

    def _add_thought(self, form: ReasoningFormat) -> None:
        if form.closes in self.shape.marker_ids:
            opens = "" if self.shape.in_reasoning else self.marker(form.opens)
            self.add_rules(f"thought: {opens} THOUGHT? {self.marker(form.closes)}", "THOUGHT: /(?s:.+)/")
        else:
            opens = "" if self.shape.in_reasoning else rf"[ \n]{{0,2}}{escaped(form.opens)}"
            self.add_rules(f"thought[lazy]: /{opens}(?s:.*){escaped(form.closes)}/")
        self.add_rules(f"space: {self.marker(form.before_answer)}" if form.before_answer else r"space: /[ \n]{0,2}/")


def marker_expression(text: str, marker_ids: Mapping[str, int]) -> str:
    """Returns the expression of a text in which each of ``marker_ids`` is a token, given by its id."""
    tokens = "|".join(re.escape(token) for token in sorted(marker_ids, key=len, reverse=True))
    parts = [part for part in re.split(f"({tokens})", text) if part] if tokens else [text]
    return " ".join(f"<[{marker_ids[part]}]>" if part in marker_ids else quoted(part) for part in parts)


def json_rule(schema: Schema | None) -> str:
    """Returns the expression of a JSON value, without optional white space: weak models may write it without end."""
    held: dict[str, Any] = dict(schema or {"type": "object"})
    held["x-guidance"] = {"whitespace_pattern": " ?"} | dict(held.get("x-guidance") or {})
    return f"%json {json.dumps(held, ensure_ascii=False)}"


def argument_schemas(tool: CallableTool) -> list[tuple[str, dict[str, Any], bool]]:
    """Returns a tool's arguments: name, schema and whether it is required. Raises CannotBeHeld if the schema constrains
    them together."""
    schema = tool.parameters or {}
    unknown = set(schema) - _HELD_KEYS
    if unknown or not isinstance(schema.get("properties", {}), Mapping):
        properties_named = " and ".join(sorted(unknown)) or "properties"
        raise CannotBeHeld(
            f"the parameters of {tool.name} have {properties_named}, which cannot be enforced in this model's format"
        )
    known = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = set(schema.get("required") or ())
    given = schema.get("properties", {})
    properties = dict(given) | {name: {} for name in sorted(required) if name not in given}
    return [
        (name, {**known, **(value if isinstance(value, Mapping) else {"allOf": [value]})}, name in required)
        for name, value in properties.items()
    ]


_HELD_KEYS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
    | {"title", "description", "$schema", "$id", "examples", "strict"}
)
"""Keys that a schema of arguments may have besides its properties, if each argument is constrained separately."""


def check_schema(tool: CallableTool) -> None:
    """Raises CannotBeHeld unless a tool's schema can be translated: it is not too deep, and the keys that matter have
    values of the right types."""
    schemas: list[Mapping[str, Any]] = [tool.parameters or {}]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for schema in schemas:
            for key in _KEY_TYPES.keys() & schema.keys():
                value = schema[key]
                _check_type(tool, key, value)
                if key in _SCHEMA_KEYS:
                    inner += value.values() if isinstance(value, dict) else value
            inner.append(schema.get("items"))
        schemas = [schema for schema in inner if isinstance(schema, Mapping)]
        if not schemas:
            return
    raise CannotBeHeld(f"the parameters of {tool.name} are nested more than {_MAX_DEPTH} levels deep")


def _check_type(tool: CallableTool, key: str, value: Any) -> None:
    types = _KEY_TYPES[key]
    if not isinstance(value, types) or isinstance(value, bool):
        names = " or ".join(_TYPE_NAMES[each] for each in types)
        raise CannotBeHeld(f"{key} in the parameters of {tool.name} must be {names}")
    if key == "required" and isinstance(value, list) and not all(isinstance(name, str) for name in value):
        raise CannotBeHeld(f"required in the parameters of {tool.name} must be a list of names")


_MAX_DEPTH = 64
_TYPE_NAMES: Mapping[type, str] = {dict: "an object", list: "a list", int: "an integer", str: "text"}
_KEY_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("properties", "$defs", "definitions"), (dict,)),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "enum", "required"), (list,)),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), (int,)),
    **dict.fromkeys(("pattern", "$ref"), (str,)),
    "type": (str, list),
}
_SCHEMA_KEYS = frozenset({"properties", "$defs", "definitions", "anyOf", "oneOf", "allOf"})
"""Keys that have schemas."""


def check_name(tool: CallableTool) -> None:
    """Raises CannotBeHeld unless the tool's name can be written outside quotes."""
    if re.fullmatch(r"[\w.:-]+", tool.name) is None:
        raise CannotBeHeld(f"{tool.name!r} is not a valid function name in this model's format")


def escaped(text: str) -> str:
    """Escapes a text for a regular expression between slashes."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")


def quoted(text: str) -> str:
    """Returns a text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)

"""The syntax of calls in the formats of single model families, for grammars. Independent of requests."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.service.parsers.base import Schema
from penstock.service.parsers.gemma_calls import FunctionGemmaParser, Gemma4Parser
from penstock.service.parsers.harmony import HARMONY
from penstock.service.parsers.lark_grammar import (
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
from penstock.service.parsers.marked_calls import DeepSeekParser, KimiK2Parser
from penstock.service.parsers.tagged_calls import GLM45, MINIMAX_M2, QWEN3_CODER, CallTags
from penstock.service.parsers.typed_values import argument_types


def _deepseek(before_json: str, after_json: str, next_call: str) -> Callable[[LarkGrammar], CallSyntax]:
    """``before_json`` and ``after_json`` surround the arguments; NAME is the name's place in the first."""

    def write(lark: LarkGrammar, rule: str, tool: CallableTool) -> str:
        check_name(tool)
        before = lark.marker(DeepSeekParser.call_opens + before_json.replace("NAME", tool.name))
        return f"{before} {json_rule(tool.parameters)} {lark.marker(after_json + DeepSeekParser.call_closes)}"

    def syntax(lark: LarkGrammar) -> CallSyntax:
        opens, closes = DeepSeekParser.section_opens[0], lark.marker(DeepSeekParser.section_closes[0])
        return CallSyntax(write, opens, next_call=quoted(next_call) if next_call else "", closes=closes)

    return syntax


def _kimi_k2(lark: LarkGrammar) -> CallSyntax:
    def write(lark: LarkGrammar, rule: str, tool: CallableTool) -> str:
        check_name(tool)
        opens = lark.marker(f"{KimiK2Parser.call_opens}functions.{tool.name}:")
        arguments = f"{lark.marker('<|tool_call_argument_begin|>')} {json_rule(tool.parameters)}"
        return f"{opens} /[0-9]{{1,3}}/ {arguments} {lark.marker(KimiK2Parser.call_closes)}"

    closes = lark.marker(KimiK2Parser.section_closes[0])
    return CallSyntax(write, KimiK2Parser.section_opens[0], next_call="", closes=closes)


def _harmony(lark: LarkGrammar) -> CallSyntax:
    """A call ends the answer. It is written as the template shows it."""

    def write(lark: LarkGrammar, rule: str, tool: CallableTool) -> str:
        check_name(tool)
        return f"{lark.marker(f'commentary to=functions.{tool.name} json<|message|>')} {json_rule(tool.parameters)}"

    return CallSyntax(write, "<|channel|>")


def add_harmony_text(lark: LarkGrammar) -> None:
    """Adds the rules of messages, of which the last is text or a call. The prompt may have begun the first."""
    begun = "earlier " if lark.shape.in_reasoning else ""
    between = "<|end|><|start|>assistant"
    lark.add_rules(
        f"start: {begun}(header earlier)* (header TEXT? | marked)",
        f'header: {lark.marker("<|channel|>")} ("analysis" | "commentary" | "final") {lark.marker("<|message|>")}',
        r"TEXT: /(?s:.+)/ & ~/(?s:.*)<\|(?s:.*)/",
    )
    if lark.has_tokens(between):
        lark.add_rules(f"earlier: TEXT? {lark.marker(between)}")
    else:
        lark.add_rules(f"earlier[lazy]: /(?s:.*){escaped(between)}/")


def _gemma(form: type[Gemma4Parser]) -> Callable[[LarkGrammar], CallSyntax]:
    def write(lark: LarkGrammar, rule: str, tool: CallableTool) -> str:
        check_name(tool)
        return f"{quoted(f'call:{tool.name}')} {_GemmaValues(lark, rule, tool, form.quote).arguments()}"

    return lambda lark: CallSyntax(write, form.opens, closes=lark.marker(form.closes), between="")


class _TagSpace(NamedTuple):
    """The line breaks that a model writes beside a format's tags."""

    before_name: str
    after_name: str
    before_value: str
    after_value: str
    before_closes: str


def _tagged(tags: CallTags, space: _TagSpace, next_call: str | None = None) -> Callable[[LarkGrammar], CallSyntax]:
    def write(lark: LarkGrammar, rule: str, tool: CallableTool) -> str:
        check_name(tool)
        opens = lark.marker(space.before_name + tags.name[0] + tool.name + tags.name[1] + space.after_name)
        closes = lark.marker(tags.ends) if tags.ends else ""
        return f"{opens} {_tagged_arguments(lark, rule, tool, tags, space)} {closes}"

    def syntax(lark: LarkGrammar) -> CallSyntax:
        closes = lark.marker(space.before_closes + tags.closes)
        return CallSyntax(write, tags.opens, next_call=next_call, closes=closes, between=quoted("\n"))

    return syntax


def _tagged_arguments(lark: LarkGrammar, rule: str, tool: CallableTool, tags: CallTags, space: _TagSpace) -> str:
    """Returns the expression of all arguments, in the order of the schema's properties. Without properties any
    argument is permitted."""
    check_schema(tool)
    is_any = not (tool.parameters or {}).get("properties") and (tool.parameters or {}).get("additionalProperties", True)
    if is_any and not (tool.parameters or {}).get("required"):
        value = _tagged_text(lark, f"{rule}_any", [{}], tags, space)
        key = f"{lark.marker(tags.key[0])} /[a-zA-Z0-9_.-]{{1,64}}/"
        return f"({key} {lark.marker(_after_key(tags, space))} {value})*"
    arguments = []
    for index, (name, schema, is_required) in enumerate(argument_schemas(tool)):
        if not re.fullmatch(r'[^<>"\n]+', name):
            raise CannotBeHeld(f"{name!r} of {tool.name} is not a valid argument name in this model's format")
        types = argument_types(tool.parameters, name)
        if "string" in types:
            texts = _text_schemas(schema, schema, tool, name)
            if "null" in types:
                texts.append({"const": "null"})
            value = _tagged_text(lark, f"{rule}_{index}_text", texts, tags, space)
        else:
            value = f"{json_rule(schema)} {lark.marker(space.before_value + tags.value[1] + space.after_value)}"
        argument = f"{lark.marker(tags.key[0] + name + _after_key(tags, space))} {value}"
        lark.add_rules(f"{rule}_{index}: {argument}")
        arguments.append(f"{rule}_{index}" + "?" * (not is_required))
    return " ".join(arguments)


def _after_key(tags: CallTags, space: _TagSpace) -> str:
    return tags.key[1] + ("\n" + tags.value[0] if tags.value[0] else "") + space.before_value


def _text_schemas(schema: Schema, root: Schema, tool: CallableTool, name: str) -> list[Schema]:
    """Returns the schemas that permit a string, of which one must match. Raises CannotBeHeld."""
    found: list[Schema] = []
    options = [schema]
    for _ in range(_MAX_OPTIONS):
        if not options:
            return found
        option = options.pop(0)
        if not isinstance(option, Mapping):
            found.append({})
            continue
        inner = [each for key in ("anyOf", "oneOf", "allOf") for each in option.get(key) or ()]
        reference = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", str(option.get("$ref", "")))
        if reference is not None:
            inner.append((root.get(reference[1]) or {}).get(reference[2], {}))
        if len(option.get("allOf") or ()) > 1 or (inner and set(option) & _TEXT_KEYS):
            break
        options += inner
        if not inner and "string" in argument_types({"properties": {"it": option}}, "it"):
            found.append(option)
    raise CannotBeHeld(f"the schema of {name!r} of {tool.name} cannot be enforced in this model's format")


def _tagged_text(lark: LarkGrammar, rule: str, schemas: Sequence[Schema], tags: CallTags, space: _TagSpace) -> str:
    """Returns the expression of a text that matches one of the schemas, with its closing tag and what follows it."""
    ends = (tags.value[1], tags.key[0], tags.ends or tags.closes)
    closes = space.before_value + tags.value[1]
    options = [_held_text(lark, f"{rule}_{index}", schema, closes, ends) for index, schema in enumerate(schemas)]
    return f"({' | '.join(options)}) {quoted(space.after_value) if space.after_value else ''}"


def _held_text(lark: LarkGrammar, rule: str, schema: Schema, closes: str, ends: Sequence[str]) -> str:
    """Returns the expression of a text that matches a schema, up to and including ``closes``. The text has none of
    ``ends``, of which ``closes`` ends with the first. Raises CannotBeHeld."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        texts = [value for value in values if isinstance(value, str)]
        if any(end in text for end in ends for text in texts):
            raise CannotBeHeld("a value of an enum contains a marker of this model's format")
        return f"({' | '.join(map(quoted, texts))}) {lark.marker(closes)}"
    bodies, terminal = _text_patterns(schema), rule.upper()
    if lark.has_tokens(closes):
        others = "|".join(map(escaped, ends))
        held = " & ".join(f"/{body}/" for body in bodies)
        lark.add_rules(rf"{terminal}: {held} & /(?s:.+)/ & ~/(?s:.*)({others})(?s:.*)/")
        return f"{terminal}{'?' * (not schema.get('minLength'))} {lark.marker(closes)}"
    # Lazy: the text ends as soon as the marker appears.
    others = "|".join([f"{escaped(ends[0])}(?s:.)", *map(escaped, ends[1:])])
    held = " & ".join(f"/{body}{escaped(closes)}/" for body in bodies)
    lark.add_rules(f"{rule}[lazy]: {terminal}", rf"{terminal}: {held} & ~/(?s:.*)({others})(?s:.*)/")
    return rule


def _text_patterns(schema: Schema) -> list[str]:
    """Returns regular expressions that a text must match, all of them. Raises CannotBeHeld."""
    longest = schema.get("maxLength")
    patterns = [f"(?s:.{{{schema.get('minLength') or 0},{'' if longest is None else longest}}})"]
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        inner = pattern.removeprefix("^").removesuffix("$")
        if re.search(r"(?<![\\\[])[\^$]", inner) or ("|" in inner and inner != pattern and "(" not in inner):
            raise CannotBeHeld(f"the pattern {pattern!r} cannot be enforced in this model's format")
        before = "" if pattern.startswith("^") else "(?s:.*)"
        after = "" if pattern.endswith("$") else "(?s:.*)"
        patterns.append(f"{before}({inner.replace('/', chr(92) + '/')}){after}")
    return patterns


class _GemmaValues:
    """The expressions of values in Gemma's notation."""

    def __init__(self, lark: LarkGrammar, rule: str, tool: CallableTool, quote: str) -> None:
        self._lark = lark
        self._rule = rule
        self._tool = tool
        self._quote = quote
        self._num_rules = 0
        self._referenced: dict[str, str] = {}
        """The rules of the schemas that references name."""
        self._unwritten: list[tuple[str, object]] = []
        """The rules of referenced schemas that are not in the grammar yet."""
        self._any = ""

    def arguments(self) -> str:
        """Returns the expression of a call's arguments. Raises CannotBeHeld."""
        check_schema(self._tool)
        whole = self._object(self._tool.parameters or {})
        while self._unwritten:
            rule, schema = self._unwritten.pop()
            self._lark.add_rules(f"{rule}: {self._value(schema)}")
        return whole

    def _new_rule(self) -> str:
        self._num_rules += 1
        return f"{self._rule}_{self._num_rules}"

    def _object(self, schema: Schema) -> str:
        """Returns the expression of an object, whose keys are sorted as templates sort them."""
        if not schema.get("properties") and not schema.get("required"):
            return '"{" "}"' if schema.get("additionalProperties") is False else self._any_object()
        given = CallableTool(self._tool.name, schema)
        after, first = '""', '""'  # what may follow after a value, and at the beginning
        for name, held, is_required in sorted(argument_schemas(given), key=lambda each: each[0].lower(), reverse=True):
            if not re.fullmatch(r"[^:,{}\[\]<\s]+", name):
                raise CannotBeHeld(f"{name!r} of {given.name} is not a valid argument name in this model's format")
            rule, otherwise = self._new_rule(), not is_required
            self._lark.add_rules(
                f"{rule}: {quoted(name + ':')} {self._value(held)}",
                f"{rule}_first: {rule} {after}" + f" | {first}" * otherwise,
                f'{rule}_after: "," {rule} {after}' + f" | {after}" * otherwise,
            )
            first, after = f"{rule}_first", f"{rule}_after"
        return f'"{{" {first} "}}"'

    def _value(self, schema: object) -> str:
        """Returns the expression of a value that matches a schema. Raises CannotBeHeld."""
        if not isinstance(schema, Mapping):
            return self._any_value()
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]))
        options = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
        if options:
            if len(schema.get("allOf") or ()) > 1:
                raise CannotBeHeld(f"allOf in {self._tool.name} cannot be enforced in this model's format")
            return f"({' | '.join(map(self._value, options))})"
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        types = argument_types({"properties": {"it": schema}}, "it") if values or "type" in schema else None
        if types is None:
            return self._any_value()
        return f"({' | '.join(self._typed(schema, each) for each in sorted(types))})"

    def _typed(self, schema: Schema, name: str) -> str:
        if name == "string":
            text = _held_text(self._lark, self._new_rule(), schema, self._quote, (self._quote,))
            return f"{self._lark.marker(self._quote)} {text}"
        if name == "object" and "enum" not in schema:
            return self._object(schema)
        if name == "array":
            return self._array(schema)
        values = [value for value in schema.get("enum", ()) if not isinstance(value, str | list | dict)]
        return json_rule({"enum": values} if values else {**_without(schema, ("$defs", "definitions")), "type": name})

    def _array(self, schema: Schema) -> str:
        least, most = schema.get("minItems") or 0, schema.get("maxItems")
        item = self._new_rule()
        self._lark.add_rules(f"{item}: {self._value(schema.get('items'))}")
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else max(most - 1, 0)}}}'
        items = '""' if most == 0 else f"({item} {more}){'?' * (not least)}"
        return f'"[" {items} "]"'

    def _reference(self, reference: str) -> str:
        if reference in self._referenced:
            return self._referenced[reference]
        keys = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", reference)
        parameters = self._tool.parameters or {}
        if keys is None or keys[2] not in (parameters.get(keys[1]) or {}):
            raise CannotBeHeld(f"{reference!r} of {self._tool.name} cannot be enforced in this model's format")
        rule = self._referenced[reference] = self._new_rule()
        self._unwritten.append((rule, parameters[keys[1]][keys[2]]))
        return rule

    def _any_value(self) -> str:
        if not self._any:
            self._any = rule = self._new_rule()
            quote = self._lark.marker(self._quote)
            text = _held_text(self._lark, f"{rule}_text", {}, self._quote, (self._quote,))
            scalar = json_rule({"type": ["number", "boolean", "null"]})
            self._lark.add_rules(
                f'{rule}: {quote} {text} | {scalar} | "[" ({rule} ("," {rule})*)? "]" | {rule}_object',
                f'{rule}_object: "{{" ({rule}_pair ("," {rule}_pair)*)? "}}"',
                f'{rule}_pair: /[a-zA-Z0-9_.-]{{1,64}}/ ":" {rule}',
            )
        return self._any

    def _any_object(self) -> str:
        return f"{self._any_value()}_object"


def _without(schema: Schema, keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in keys}


_MAX_OPTIONS = 64
"""The limit on schemas inside the schema of one argument."""
_TEXT_KEYS = frozenset({"pattern", "minLength", "maxLength", "enum", "const"})
FAMILY_SYNTAXES: Mapping[str, Callable[[LarkGrammar], CallSyntax]] = {
    "qwen3_coder": _tagged(QWEN3_CODER, _TagSpace("\n", "\n", "\n", "\n", "\n")),
    "glm45": _tagged(GLM45, _TagSpace("", "\n", "", "\n", "")),
    "minimax_m2": _tagged(MINIMAX_M2, _TagSpace("\n", "\n", "", "\n", "\n"), next_call=""),
    "deepseek_v3": _deepseek("function<｜tool▁sep｜>NAME\n```json\n", "\n```", "\n"),
    "deepseek_v31": _deepseek("NAME<｜tool▁sep｜>", "", ""),
    "kimi_k2": _kimi_k2,
    "gemma4": _gemma(Gemma4Parser),
    "functiongemma": _gemma(FunctionGemmaParser),
    HARMONY: _harmony,
}
"""For each format, what makes its syntax in a grammar."""

"""Grammars, in the form of Lark, that allow a format's tool calls and nothing else."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.clients.gateway.reasoning import REASONING_FORMATS


def call_grammar(
    tool_format: str,
    tools: Sequence[tuple[str, Mapping[str, Any] | None]],
    *,
    one: bool,
    reasoning: str | None,
    in_reasoning: bool,
) -> str:
    """Of names and the schemas of their arguments. ``one``: a single call. Where the model's answers have a section of
    reasoning it may come before, and must where the prompt has opened it already."""
    names = [f"call_{index}" for index in range(len(tools))]
    rules = [GRAMMARS[tool_format](name, *tool) for name, tool in zip(names, tools, strict=True)]
    before = "" if reasoning is None else "thought space " if in_reasoning else "(thought space)? "
    calls = "call" if one else f"call ({_BETWEEN[tool_format]} call)*"
    lines = [f"start: {before}{calls}", f"call: {' | '.join(names)}", *rules]
    if reasoning is not None:
        form = REASONING_FORMATS[reasoning]
        begin, end = ("" if in_reasoning else _escaped(form.opens)), _escaped(form.closes)
        lines += [f"thought[lazy]: /{begin}(?s:.*){end}/", r"space: /[ \n]{0,2}/"]
    return "\n".join(lines)


def _hermes(rule: str, name: str, parameters: Mapping[str, Any] | None) -> str:
    return f"{rule}: {_quoted(f'<tool_call>{_NEWLINE}')} {_body(name, 'arguments', parameters)} {_quoted(_HERMES_END)}"


def _llama3_json(rule: str, name: str, parameters: Mapping[str, Any] | None) -> str:
    return f"{rule}: {_body(name, 'parameters', parameters)}"


def _body(name: str, key: str, parameters: Mapping[str, Any] | None) -> str:
    schema = json.dumps(dict(parameters) if parameters else {"type": "object"}, ensure_ascii=False)
    begin = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
    return f'{_quoted(begin)} %json {schema} "}}"'


def _escaped(text: str) -> str:
    """For a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_NEWLINE = "\n"
_HERMES_END = "\n</tool_call>"
_BETWEEN = {"hermes": _quoted("\n"), "llama3_json": _quoted("; ")}
GRAMMARS: Mapping[str, Callable[[str, str, Mapping[str, Any] | None], str]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
}
"""By format, the rule of one function's call."""

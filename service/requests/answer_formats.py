"""The formats of tool calls and reasoning in a model's outputs: set by the operator, or detected from its templates.

A template that renders a call in a conversation's history reveals the model's format. So does the vocabulary of
gpt-oss, whatever its template renders.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage, TemplateToolCall
from penstock.service.errors import Reason, ServiceError
from penstock.service.parsers.harmony import HARMONY, HARMONY_MARKERS
from penstock.service.parsers.reasoning import REASONING_FORMATS
from penstock.service.parsers.registry import AUTO, NONE, markers
from penstock.service.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"probe": {"type": "string"}}},
    },
}
_CALL = TemplateToolCall("probecall", "probe_tool", {"probe": "value"})  # Mistral's ids have 9 letters
_QUESTION = TemplateMessage("user", "question")
_SHOWN_CALLS = {
    HARMONY: re.compile(r"functions\.probe_tool ?<\|(channel|constrain|message)\|>"),
    "deepseek_v31": re.compile(r"<｜tool▁call▁begin｜>probe_tool<｜tool▁sep｜>"),
    "deepseek_v3": re.compile(r"<｜tool▁sep｜>probe_tool"),
    "kimi_k2": re.compile(r"<\|tool_call_begin\|>[\w.:-]*probe\w*(:\d+)?<\|tool_call_argument_begin\|>"),
    "gemma4": re.compile(r"<\|tool_call>call:probe_tool\{"),
    "functiongemma": re.compile(r"<start_function_call>call:probe_tool\{"),
    "qwen3_coder": re.compile(r"<tool_call>\s*<function=probe_tool>"),
    "glm45": re.compile(r"<tool_call>probe_tool\s*<arg_key>"),
    "minimax_m2": re.compile(r'<minimax:tool_call>\s*<invoke name="probe_tool">'),
    "mistral": re.compile(r"\[TOOL_CALLS\]"),
    "hermes": re.compile(r'<tool_call>\s*\{"name":\s*"probe_tool"'),
    "pythonic": re.compile(r"\[probe_tool\("),
    "llama3_json": re.compile(r'\{"name":\s*"probe_tool",\s*"parameters":\s*\{"probe"'),
}
"""For each format, how a call looks in a rendered conversation."""
_MAX_ATTEMPTS = 5
"""How often a template is rendered on a machine that is too busy."""


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """The formats of an output; None: unknown or absent."""

    tool: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """The formats of a model's outputs, which may have a chat template of its own for tools."""

    plain: OutputFormats = field(default_factory=OutputFormats)
    with_tools: OutputFormats = field(default_factory=OutputFormats)
    shown_call: str = ""
    """A conversation with a call of ``probe_tool``, as the template writes it: formats have variants."""
    marker_ids: Mapping[str, int] = field(default_factory=dict)
    """The ids of the formats' markers that are tokens of the model and not text (``Tokenizer.marker_ids``)."""
    reasoning_parser: str = AUTO
    """The operator's choice."""

    def of(self, *, with_tools: bool) -> OutputFormats:
        """Returns the formats of the output to a conversation with or without tools."""
        return self.with_tools if with_tools else self.plain


def find_formats(tokenizer: Tokenizer, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> AnswerFormats:
    """Returns a model's formats. Each parser is the name of a format, or NONE, or AUTO, which renders the templates."""
    shown_call = _shown_call(tokenizer, [_TOOL])
    of_vocabulary = HARMONY if tokenizer.marker_ids.keys() >= set(HARMONY_MARKERS) else None
    shown = next((name for name, call in _SHOWN_CALLS.items() if call.search(shown_call)), of_vocabulary)
    tool = _named(tool_call_parser, shown)
    of_template = [
        OutputFormats(tool, _named(reasoning_parser, _reasoning_format(tokenizer, with_tools) or of_vocabulary))
        for with_tools in (False, True)
    ]
    found = frozenset[str]().union(*(markers(each.tool, each.reasoning) for each in of_template))
    marker_ids = {marker: token_id for marker, token_id in tokenizer.marker_ids.items() if marker in found}
    plain, with_tools = of_template
    formats = AnswerFormats(plain, with_tools, shown_call, marker_ids, reasoning_parser)
    _log.info("parsers of outputs: tool calls %s, reasoning %s", tool or NONE, plain.reasoning or NONE)
    return formats


def _named(parser: str, detected: str | None) -> str | None:
    if parser == AUTO:
        return detected
    return None if parser == NONE else parser


def _shown_call(tokenizer: Tokenizer, tools: Sequence[Mapping[str, object]], reasoning: str | None = None) -> str:
    """Returns a rendered conversation with a call."""
    history = [
        _QUESTION,
        TemplateMessage("assistant", None, [_CALL], reasoning=reasoning),
        TemplateMessage("tool", "answer", tool_call_id=_CALL.id, name=_CALL.name),
    ]
    return _rendered(tokenizer, TemplateInput(history, tools=tools))


def _reasoning_format(tokenizer: Tokenizer, with_tools: bool) -> str | None:
    # Templates that do not open reasoning render an empty one if it is disabled.
    tools = [_TOOL] if with_tools else []
    variables: tuple[Mapping[str, object], ...] = ({}, {"enable_thinking": False})
    shown = [_rendered(tokenizer, TemplateInput([_QUESTION], tools=tools, variables=each)) for each in variables]
    # Others show only the reasoning before a call.
    text = "".join([*shown, _shown_call(tokenizer, tools, reasoning="thought")])
    return next((name for name, form in REASONING_FORMATS.items() if form.opens in text), None)


def _rendered(tokenizer: Tokenizer, chat: TemplateInput) -> str:
    """Returns a rendered conversation; empty if the model has no template, or the template refuses it."""
    for _ in range(_MAX_ATTEMPTS):
        try:
            return tokenizer.render_chat(chat)
        except ServiceError as error:
            if error.reason is not Reason.PREPARATION_FULL:
                return ""
    _log.warning("the machine is too busy to render the chat template; set --tool-call-parser and --reasoning-parser")
    return ""

"""Renders messages to a prompt with the model's own template, by the conventions that templates are written for.

The template is the operator's file, the messages are a caller's: it runs in Jinja's immutable sandbox. Knows no tokens.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from penstock.service.errors import Reason, ServiceError, invalid
from penstock.service.specials import CALLERS

_MAX_REASON = 200
_NOT_ASCII = re.compile(f"[^\\x00-\\x7f{CALLERS}]")


class ToolCall(NamedTuple):
    """A call that an answer of the assistant's made."""

    id: str
    name: str
    arguments: Mapping[str, Any]


class Message(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and what else its template is to see. ``tools`` and ``variables`` are plain data of JSON."""

    messages: Sequence[Message]
    add_generation_prompt: bool = True
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] | None = None
    continue_final_message: bool = False
    """The prompt ends where the last message does, within the assistant's turn."""


class TemplateSyntaxError(Exception):
    """A template that is no valid Jinja; the text says where and why."""


class _Refusal(Exception):
    """What a template says by ``raise_exception``."""


class ChatTemplate:
    """A compiled template. Rendering changes nothing, so threads may share one."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens`` are the template's variables ``bos_token``, ``eos_token`` and so on.

        Raises TemplateSyntaxError.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateSyntaxError(f"line {error.lineno}: {error.message}") from None
        self._variables: dict[str, Any] = {**special_tokens, "tools": None, "documents": None}
        tree = environment.parse(source)
        constants = (constant.value for constant in tree.find_all(jinja2.nodes.Const))
        self.words = frozenset(constant for constant in constants if isinstance(constant, str))
        """Its texts: what it may compare a role with, or refuse with."""
        self.names = self.words | {attribute.attr for attribute in tree.find_all(jinja2.nodes.Getattr)}
        """What it may compare any other value with, or look up in one."""
        names = tree.find_all(jinja2.nodes.Name)
        self.shows_tools = any(name.name == "tools" and name.ctx == "load" for name in names)
        """Whether it looks at ``tools`` at all."""

    def render(self, chat: Chat) -> str:
        """The prompt. Raises ServiceError where the template refuses the messages, or cannot cope with them."""
        if not chat.continue_final_message:
            return self._render(chat)
        # As transformers does it: the space tells whether the template takes white space from the ends of messages.
        end = f"end{secrets.token_hex(16)}"
        last = chat.messages[-1]
        messages = [*chat.messages[:-1], last._replace(content=f"{last.content}{end} ")]
        before, _, after = self._render(replace(chat, messages=messages)).rpartition(end)
        if not before or end in before:
            raise ServiceError(
                Reason.CHAT_NOT_CONTINUABLE,
                "chat.continue_final_message: this model's chat template does not show the last message as it is; "
                "leave it out, or send text or token_ids",
                field="chat.continue_final_message",
            )
        return before if after.startswith(" ") else before.rstrip()

    def render_after_answer(self, chat: Chat) -> str:
        """What follows an answer of the assistant's that stands in a prompt as it was given: the end of its turn, then
        the messages. Raises ServiceError as ``render`` does, and where the template shows answers otherwise."""
        answer = f"answer{secrets.token_hex(16)}"
        turn = [Message("user", "question"), Message("assistant", answer)]
        before, _, after = self.render(replace(chat, messages=[*turn, *chat.messages])).rpartition(answer)
        if not before or answer in before:
            raise ServiceError(Reason.CHAT_NOT_CONTINUABLE, field="chat")
        return after

    def _render(self, chat: Chat) -> str:
        variables = {**self._variables, **(chat.variables or {})}
        if chat.tools:
            variables["tools"] = list(chat.tools)
        variables["messages"] = [_as_turn(message) for message in chat.messages]
        variables["add_generation_prompt"] = chat.add_generation_prompt
        try:
            return self._template.render(variables)
        except _Refusal as refusal:
            raise invalid("chat", f"the model's chat template refuses it{self._reason(refusal)}") from None
        except Exception as error:
            # Whatever a template does with a caller's messages is a fault of this one request.
            raise invalid("chat", f"the model's chat template fails on it ({type(error).__name__})") from error

    def _reason(self, refusal: _Refusal) -> str:
        """What it says where that is a constant of the template: else it may hold what the caller wrote, which no
        status repeats."""
        said = str(refusal)
        return f": {said[:_MAX_REASON]}" if said in self.words else ""


def _as_turn(message: Message) -> dict[str, Any]:
    """A message as templates are written for it: what it lacks is not there at all."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [_as_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.name:
        turn["name"] = message.name
    return turn


def _as_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks what a model was trained on; in a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as it is: the filter of Jinja escapes it for HTML. What marks callers' text stays, whatever is escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, **options)
    return _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: object) -> None:
    raise _Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)

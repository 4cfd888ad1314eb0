"""Renders messages to a prompt with the model's own template, by the conventions that templates are written for.

The template is the operator's file, the messages are a caller's: it runs in Jinja's immutable sandbox. Knows no tokens.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from penstock.service.errors import Reason, ServiceError, invalid

_MAX_REASON = 200


class Message(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str


class TemplateSyntaxError(Exception):
    """A template that is no valid Jinja; the text says where and why."""


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
        constants = environment.parse(source).find_all(jinja2.nodes.Const)
        self.words = frozenset(constant.value for constant in constants if isinstance(constant.value, str))
        """What the template may compare a role with."""

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt. Raises ServiceError where the template refuses the messages, or cannot cope with them."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(self._variables, messages=turns, add_generation_prompt=add_generation_prompt)
        except _Refusal as refusal:
            raise invalid("chat", f"the model's chat template refuses it: {str(refusal)[:_MAX_REASON]}") from None
        except Exception as error:
            # Whatever a template does with a caller's messages is a fault of this one request.
            raise invalid("chat", f"the model's chat template fails on it ({type(error).__name__})") from error

    def render_after_answer(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """What follows an answer of the assistant's that stands in a prompt as it was given: the end of its turn, then
        ``messages``. Raises ServiceError as ``render`` does, and where the template shows answers otherwise."""
        answer = f"answer{secrets.token_hex(16)}"
        turn = [Message("user", "question"), Message("assistant", answer)]
        before, _, after = self.render([*turn, *messages], add_generation_prompt).rpartition(answer)
        if not before or answer in before:
            raise ServiceError(Reason.CHAT_NOT_CONTINUABLE, field="chat")
        return after


class _Refusal(Exception):
    """What a template says by ``raise_exception``."""


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks what a model was trained on; in a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as it is: the filter of Jinja escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: object) -> None:
    raise _Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)

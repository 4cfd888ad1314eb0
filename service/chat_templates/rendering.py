"""Renders messages to a prompt with the model's own template, by the conventions that templates are written for.

Both the template and the messages are untrusted: this runs in Jinja's immutable sandbox, in a process that may be ended
at any time (``process``).
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jinja2

from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage, TemplateToolCall
from penstock.service.chat_templates.environment import TemplateEnvironment, TemplateRefusal
from penstock.service.chat_templates.facts import TemplateFacts
from penstock.service.chat_templates.frames import TemplateFailure
from penstock.service.chat_templates.text import own_text

_ROLES = frozenset({"assistant", "developer", "system", "tool", "user"})
"""OpenAI's roles."""
_INSTRUCTIONS = frozenset({"developer", "system"})


class RenderError(Exception):
    """A conversation that a template does not render. The text gives the reason, for the caller."""

    def __init__(self, failure: TemplateFailure, problem: str = "") -> None:
        super().__init__(problem)
        self.failure = failure


class TemplateSyntaxError(Exception):
    """A template that cannot be compiled. The text gives the place and the reason."""


class CompiledTemplate:
    """A compiled template. It renders to ``TemplateText``."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens`` are the template's variables, such as ``bos_token``. Raises TemplateSyntaxError."""
        environment = TemplateEnvironment()
        try:
            self._template = environment.from_string(source)
            self._facts = facts = TemplateFacts(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateSyntaxError(f"is not valid Jinja, line {error.lineno}: {error.message}") from None
        except MemoryError:
            raise
        except RecursionError:
            raise TemplateSyntaxError("is nested too deeply") from None
        except Exception as error:  # valid Jinja may exceed the limits of Python's own compiler
            raise TemplateSyntaxError(f"cannot be compiled ({type(error).__name__})") from None
        named = {name: own_text(token) for name, token in special_tokens.items()}
        self._variables: dict[str, Any] = {**named, "tools": None, "documents": None}
        self.shows_tools = facts.shows_tools
        self.roles = _ROLES | facts.roles
        """The roles that messages may have."""

    def render(self, chat: TemplateInput) -> str:
        """Returns the prompt. If the template refuses the messages, their instructions are moved to the beginning.
        Raises RenderError if it refuses that too, or fails on them."""
        try:
            return self._render_in_order(chat)
        except RenderError as error:
            moved = _with_system_first(chat.messages)
            if moved == list(chat.messages):
                raise
            first = error
        try:
            return self._render_in_order(replace(chat, messages=moved))
        except RenderError:
            raise first from first.__cause__

    def _render_in_order(self, chat: TemplateInput) -> str:
        if not chat.continue_final_message:
            return self._render(chat)
        # The same way as in transformers: the space shows whether the template strips the ends of messages.
        end = f"end{secrets.token_hex(16)}"
        last = chat.messages[-1]
        messages = [*chat.messages[:-1], last._replace(content=f"{last.content}{end} ")]
        before, _, after = self._render(replace(chat, messages=messages)).rpartition(end)
        if not before or end in before:
            raise RenderError(TemplateFailure.NOT_CONTINUABLE)
        return before if after.startswith(" ") else before.rstrip()

    def render_after_answer(self, chat: TemplateInput) -> str:
        """Returns the text that follows the assistant's answer in a prompt: the end of its turn, then the messages.
        Raises RenderError as ``render`` does, and if the template does not show answers unchanged."""
        answer = f"answer{secrets.token_hex(16)}"
        turn = [TemplateMessage("user", "question"), TemplateMessage("assistant", answer)]
        before, _, after = self._render_in_order(replace(chat, messages=[*turn, *chat.messages])).rpartition(answer)
        if not before or answer in before:
            raise RenderError(TemplateFailure.ANSWER_NOT_SHOWN)
        return after

    def _render(self, chat: TemplateInput) -> str:
        try:
            return self._render_messages(chat, chat.messages)
        except RenderError as error:
            simplified = [_simplified(message) for message in chat.messages]
            if simplified == list(chat.messages):
                raise
            first = error
        try:
            return self._render_messages(chat, simplified)
        except RenderError:
            raise first from first.__cause__

    def _render_messages(self, chat: TemplateInput, messages: Iterable[TemplateMessage]) -> str:
        variables = {**self._variables, **(chat.variables or {})}
        if chat.tools:
            variables["tools"] = list(chat.tools)
        variables["messages"] = [self._turn(message) for message in messages]
        variables["add_generation_prompt"] = chat.add_generation_prompt
        try:
            return self._template.render(variables)
        except TemplateRefusal as refusal:
            raise RenderError(
                TemplateFailure.REFUSED, f"the model's chat template refuses it{self._reason(refusal)}"
            ) from None
        except MemoryError:
            raise
        except Exception as error:
            # If a template fails on a caller's messages, only this request fails.
            raise RenderError(
                TemplateFailure.REFUSED, f"the model's chat template fails on it ({type(error).__name__})"
            ) from error

    def _reason(self, refusal: TemplateRefusal) -> str:
        """Returns the refusal's reason if it is a constant of the template. Other reasons may contain the caller's
        text, which a status never repeats."""
        message = str(refusal)
        return f": {message[:200]}" if message in self._facts.words else ""

    def _turn(self, message: TemplateMessage) -> dict[str, Any]:
        """Returns a message in the form that templates expect: fields that it lacks are left out."""
        turn: dict[str, Any] = {"role": self._role(message.role)}
        if message.content is not None or self._facts.tests_content_for_none:
            turn["content"] = message.content
        if message.reasoning is not None:
            # The first two names are from transformers, the last one is from vLLM.
            turn["reasoning_content"] = turn["thinking"] = message.reasoning
            if "reasoning" in self._facts.names:
                turn["reasoning"] = message.reasoning
        if message.tool_calls:
            turn["tool_calls"] = [_as_call(call) for call in message.tool_calls]
        if message.tool_call_id:
            turn["tool_call_id"] = message.tool_call_id
        if message.name:
            turn["name"] = message.name
        return turn

    def _role(self, role: str) -> str:
        """Returns the role for the template. Only a role that the template knows may be part of a special token, such
        as <|user|>."""
        if role == "developer" and role not in self._facts.roles:
            role = "system"
        return own_text(role) if role in self.roles else role


def _as_call(call: TemplateToolCall) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, str) else dict(call.arguments)
    function = {"name": call.name, "arguments": arguments}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}


def _simplified(message: TemplateMessage) -> TemplateMessage:
    """Returns a simpler message, without features that few templates support."""
    calls = [
        call._replace(arguments={"arguments": call.arguments}) if isinstance(call.arguments, str) else call
        for call in message.tool_calls
    ]
    # gpt-oss's template accepts either content or reasoning next to a call.
    reasoning = None if message.content and message.tool_calls else message.reasoning
    return message._replace(content=message.content or "", tool_calls=calls or message.tool_calls, reasoning=reasoning)


def _with_system_first(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Returns a conversation whose instructions are one message at its beginning, as in vLLM and SGLang: many templates
    refuse others."""
    instructions = [message for message in messages if message.role in _INSTRUCTIONS]
    if not instructions:
        return list(messages)
    text = "\n".join(message.content for message in instructions if message.content)
    others = [message for message in messages if message.role not in _INSTRUCTIONS]
    return [instructions[0]._replace(content=text), *others]

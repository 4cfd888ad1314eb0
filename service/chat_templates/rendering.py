"""Renders messages to a prompt with the model's own template, by the conventions that templates are written for.

The template is a stranger's file and the messages are a caller's: this runs in Jinja's immutable sandbox, in a process
that may be ended at any time (``template_process``). Knows no tokens.
"""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jinja2

from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage, TemplateToolCall
from penstock.service.chat_templates.environment import TemplateEnvironment, TemplateRefusal
from penstock.service.chat_templates.facts import TemplateFacts
from penstock.service.chat_templates.frames import TemplateFailure
from penstock.service.chat_templates.text import own_text

_MAX_REASON = 200
_ROLES = frozenset({"assistant", "developer", "system", "tool", "user"})
"""OpenAI's."""


class RenderError(Exception):
    """A conversation that a template does not render."""

    def __init__(self, failure: TemplateFailure, problem: str = "") -> None:
        super().__init__(problem)
        self.failure = failure
        self.problem = problem
        """What is wrong, for the caller."""


class TemplateSyntaxError(Exception):
    """A template that cannot be compiled; the text says where and why."""


class CompiledTemplate:
    """A compiled template. It renders ``TemplateText``."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens`` are the template's variables ``bos_token``, ``eos_token`` and so on.

        Raises TemplateSyntaxError.
        """
        environment = TemplateEnvironment()
        try:
            self._template = environment.from_string(source)
            self._facts = facts = TemplateFacts(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateSyntaxError(f"is no valid Jinja, line {error.lineno}: {error.message}") from None
        except MemoryError:
            raise
        except RecursionError:
            raise TemplateSyntaxError("is nested too deeply") from None
        except Exception as error:  # of Python's own compiler, whose limits a template of valid Jinja may exceed
            raise TemplateSyntaxError(f"cannot be compiled ({type(error).__name__})") from None
        named = {name: own_text(token) for name, token in special_tokens.items()}
        self._variables: dict[str, Any] = {**named, "tools": None, "documents": None}
        self.shows_tools = facts.shows_tools
        """Whether it looks at ``tools`` at all."""
        self.roles = _ROLES | facts.roles
        """The roles that messages may have."""

    def render(self, chat: TemplateInput) -> str:
        """The prompt. Raises RenderError where the template refuses the messages, or cannot cope with them."""
        if not chat.continue_final_message:
            return self._render(chat)
        # As transformers does it: the space tells whether the template takes white space from the ends of messages.
        end = f"end{secrets.token_hex(16)}"
        last = chat.messages[-1]
        messages = [*chat.messages[:-1], last._replace(content=f"{last.content}{end} ")]
        before, _, after = self._render(replace(chat, messages=messages)).rpartition(end)
        if not before or end in before:
            raise RenderError(TemplateFailure.NOT_CONTINUABLE)
        return before if after.startswith(" ") else before.rstrip()

    def render_after_answer(self, chat: TemplateInput) -> str:
        """What follows an answer of the assistant's that stands in a prompt as it was given: the end of its turn, then
        the messages. Raises RenderError as ``render`` does, and where the template shows answers otherwise."""
        answer = f"answer{secrets.token_hex(16)}"
        turn = [TemplateMessage("user", "question"), TemplateMessage("assistant", answer)]
        before, _, after = self.render(replace(chat, messages=[*turn, *chat.messages])).rpartition(answer)
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
            # Whatever a template does with a caller's messages is a fault of this one request.
            raise RenderError(
                TemplateFailure.REFUSED, f"the model's chat template fails on it ({type(error).__name__})"
            ) from error

    def _reason(self, refusal: TemplateRefusal) -> str:
        """What it says where that is a constant of the template: else it may hold what the caller wrote, which no
        status repeats."""
        said = str(refusal)
        return f": {said[:_MAX_REASON]}" if said in self._facts.words else ""

    def _turn(self, message: TemplateMessage) -> dict[str, Any]:
        """A message as templates are written for it: what it lacks is not there at all."""
        turn: dict[str, Any] = {"role": self._role(message.role)}
        if message.content is not None or self._facts.tests_content_for_none:
            turn["content"] = message.content
        if message.reasoning is not None:
            # As transformers has it; the last name is vLLM's.
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
        """A role that may be part of a special token, such as <|user|>, is one that the template knows."""
        if role == "developer" and role not in self._facts.roles:
            role = "system"
        return own_text(role) if role in self.roles else role


def _as_call(call: TemplateToolCall) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, str) else dict(call.arguments)
    function = {"name": call.name, "arguments": arguments}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}


def _simplified(message: TemplateMessage) -> TemplateMessage:
    """A message for a template that fails on what few templates know."""
    calls = [
        call._replace(arguments={"arguments": call.arguments}) if isinstance(call.arguments, str) else call
        for call in message.tool_calls
    ]
    # gpt-oss's template takes either content or reasoning beside a call.
    reasoning = None if message.content and message.tool_calls else message.reasoning
    return message._replace(content=message.content or "", tool_calls=calls or message.tool_calls, reasoning=reasoning)

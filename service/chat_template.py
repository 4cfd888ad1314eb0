"""Renders messages to a prompt with the model's own template, by the conventions that templates are written for.

The template is the operator's file, the messages are a caller's: it runs in Jinja's immutable sandbox. Knows no tokens.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

import jinja2

from penstock.service.errors import Reason, ServiceError, invalid
from penstock.service.template_environment import TemplateEnvironment, TemplateRefusal
from penstock.service.template_facts import TemplateFacts
from penstock.service.template_text import own_text

_MAX_REASON = 200
_ROLES = frozenset({"assistant", "developer", "system", "tool", "user"})
"""OpenAI's."""


class ToolCall(NamedTuple):
    """A call that an answer of the assistant's made."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    """As the model wrote them, where that is not the JSON text of an object."""


class Message(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str | None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str | None = None


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


class ChatTemplate:
    """A compiled template. Rendering changes nothing, so threads may share one.

    What it renders is ``TemplateText``, which tells the template's own text from the caller's.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens`` are the template's variables ``bos_token``, ``eos_token`` and so on.

        Raises TemplateSyntaxError.
        """
        environment = TemplateEnvironment()
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateSyntaxError(f"line {error.lineno}: {error.message}") from None
        named = {name: own_text(token) for name, token in special_tokens.items()}
        self._variables: dict[str, Any] = {**named, "tools": None, "documents": None}
        self.source = source
        """As its author wrote it."""
        self._facts = facts = TemplateFacts(environment.parse(source))
        self.shows_tools = facts.shows_tools
        """Whether it looks at ``tools`` at all."""
        self.roles = _ROLES | facts.roles
        """The roles that messages may have."""

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
        try:
            return self._render_messages(chat, chat.messages)
        except ServiceError as error:
            simplified = [_simplified(message) for message in chat.messages]
            if simplified == list(chat.messages):
                raise
            first = error
        try:
            return self._render_messages(chat, simplified)
        except ServiceError:
            raise first from first.__cause__

    def _render_messages(self, chat: Chat, messages: Iterable[Message]) -> str:
        variables = {**self._variables, **(chat.variables or {})}
        if chat.tools:
            variables["tools"] = list(chat.tools)
        variables["messages"] = [self._turn(message) for message in messages]
        variables["add_generation_prompt"] = chat.add_generation_prompt
        try:
            return self._template.render(variables)
        except TemplateRefusal as refusal:
            _clear_frames(refusal)
            raise invalid("chat", f"the model's chat template refuses it{self._reason(refusal)}") from None
        except Exception as error:
            # Whatever a template does with a caller's messages is a fault of this one request.
            _clear_frames(error)
            raise invalid("chat", f"the model's chat template fails on it ({type(error).__name__})") from error

    def _reason(self, refusal: TemplateRefusal) -> str:
        """What it says where that is a constant of the template: else it may hold what the caller wrote, which no
        status repeats."""
        said = str(refusal)
        return f": {said[:_MAX_REASON]}" if said in self._facts.words else ""

    def _turn(self, message: Message) -> dict[str, Any]:
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


def _clear_frames(error: Exception) -> None:
    """Has the frames of a template that failed let go of the messages. jinja2 makes frames with the template's lines
    for the traceback, and these and their callers hold each other: a circle, until the cycle collector comes by."""
    entry = error.__traceback__
    while entry is not None:
        frame: FrameType | None = entry.tb_frame
        while frame is not None:
            try:
                frame.clear()
            except RuntimeError:
                break  # it still runs, and so do its callers
            frame = frame.f_back
        entry = entry.tb_next


def _as_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, str) else dict(call.arguments)
    function = {"name": call.name, "arguments": arguments}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}


def _simplified(message: Message) -> Message:
    """A message for a template that fails on what few templates know."""
    calls = [
        call._replace(arguments={"arguments": call.arguments}) if isinstance(call.arguments, str) else call
        for call in message.tool_calls
    ]
    # gpt-oss's template takes either content or reasoning beside a call.
    reasoning = None if message.content and message.tool_calls else message.reasoning
    return message._replace(content=message.content or "", tool_calls=calls or message.tool_calls, reasoning=reasoning)

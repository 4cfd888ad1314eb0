"""A conversation whose every text of the caller's is marked, so that a template cannot make special tokens of it."""

from typing import Any

from penstock.service.chat_template import Chat, ChatTemplate, Message, ToolCall
from penstock.service.specials import Specials

_USUAL_ROLES = frozenset({"system", "user", "assistant", "tool"})


class ChatGuard:
    """Marks what goes to one template, of one conversation."""

    def __init__(self, specials: Specials, template: ChatTemplate) -> None:
        self._specials = specials
        self._template = template
        self._marked: dict[str, str] = {}
        """What was met already: lists of JSON may be long."""

    def guard(self, chat: Chat) -> Chat:
        """``chat`` with its texts marked; names of the template's variables are not shown, and stay."""
        return Chat(
            [self._message(message) for message in chat.messages],
            add_generation_prompt=chat.add_generation_prompt,
            tools=[self._value(tool) for tool in chat.tools],
            variables={name: self._value(value) for name, value in (chat.variables or {}).items()},
            continue_final_message=chat.continue_final_message,
        )

    def _message(self, message: Message) -> Message:
        return Message(
            self._role(message.role),
            self._specials.guarded(message.content),
            [
                ToolCall(self._text(call.id), self._text(call.name), self._value(call.arguments))
                for call in message.tool_calls
            ],
            self._text(message.tool_call_id),
            self._text(message.name),
        )

    def _role(self, role: str) -> str:
        """A role that the template asks for must reach it as it is, unless it holds a special token or an end of one;
        any other has no business in a special token."""
        is_known = role in _USUAL_ROLES or role in self._template.words
        return role if is_known and self._specials.guarded(role) == role else self._specials.guarded_name(role)

    def _value(self, value: Any) -> Any:
        """Plain data of JSON, keys and values."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {self._text(key): self._value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._value(item) for item in value]
        return value

    def _text(self, text: str) -> str:
        marked = self._marked.get(text)
        if marked is None:
            marked = self._marked[text] = self._specials.guarded_value(text, self._template.names)
        return marked

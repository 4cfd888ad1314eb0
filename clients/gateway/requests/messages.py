"""Converts a Messages request to a chat: blocks become messages and calls, and options get the names that chats use."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.clients.gateway.errors import invalid
from penstock.clients.gateway.field_names import CHAT_NAMES, Names, caller_name
from penstock.clients.gateway.schemas.chat import (
    ChatRequest,
    ChatRequestMessage,
    FunctionCall,
    FunctionDefinition,
    MessageToolCall,
    Tool,
)
from penstock.clients.gateway.schemas.common import JsonSchema, ResponseFormat
from penstock.clients.gateway.schemas.messages import (
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

_BILLING = "x-anthropic-billing-header:"
"""The prefix of a block that Claude Code changes in each request, so that no prompt would be in the prefix cache."""
_MESSAGE = re.compile(r"(?:start\.)?chat\.messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?(?:\.(\w+))?")
_NAMES: Names = (
    (r"sampling\.max_tokens", "max_tokens"),
    (r"sampling\.stop", "stop_sequences"),
    (r"sampling\.thinking_token_budget", "thinking.budget_tokens"),
    (r"constraint(\.json_schema)?", "output_config.format.schema"),
    (r"response_format(\.json_schema\.schema)?", "output_config.format.schema"),
    (r"chat\.continue_final_message", "messages"),
    (r"chat\.parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    (r"chat\.tools(\[\d+\])\.function\.parameters_json", r"tools\1.input_schema"),
    (r"chat\.tools(\[\d+\])\.function", r"tools\1"),
    (r"chat\.template_variables_json", "thinking"),
    *CHAT_NAMES,
)


@dataclass(slots=True)
class _MessagePlace:
    """The place of a message of the chat in the request."""

    text: str
    """The path of its text."""
    block: str
    """The path of its only block, if that has other fields."""
    calls: list[str] = field(default_factory=list)
    """The path of the block of each call."""


@dataclass(frozen=True, slots=True)
class MessageNames:
    """The caller's names of the chat's fields. It has none of their texts: a stream keeps it to its end."""

    _places: Sequence[_MessagePlace]

    def caller_name(self, field: str) -> str:
        """The caller's name of a field of the contract."""
        if (found := _MESSAGE.match(field)) is None:
            return caller_name(field, _NAMES)
        place, rest = self._places[int(found[1])], field[found.end() :]
        if found[2] is not None:
            name = {"arguments_json": ".input"}.get(found[3] or "", f".{found[3]}" if found[3] else "")
            return place.calls[int(found[2])] + name + rest
        names = {"content": place.text, "tool_call_id": f"{place.block}.tool_use_id"}
        return names.get(found[3] or "", place.block) + rest


@dataclass(frozen=True, slots=True)
class ChatOfMessages:
    """A Messages request as a chat."""

    chat: ChatRequest
    names: MessageNames


class _Messages:
    """The messages of a chat."""

    def __init__(self) -> None:
        self.messages: list[ChatRequestMessage] = []
        self.places: list[_MessagePlace] = []
        self._texts: list[str] = []
        """The texts of the last message, if it is the user's."""

    def add_message(self, role: str, text: str | None, place: _MessagePlace, tool_call_id: str | None = None) -> None:
        """Adds a message. Consecutive texts of the user are merged: many chat templates refuse several."""
        if role == "user" and self._texts:
            self._texts.append(text or "")
            return
        self.join_texts()
        self._texts = [text or ""] if role == "user" else []
        self.messages.append(ChatRequestMessage(role=role, content=text, tool_call_id=tool_call_id))
        self.places.append(place)

    def join_texts(self) -> None:
        """Joins the texts of the last message."""
        if self._texts:
            self.messages[-1].content = "\n".join(self._texts)

    def add_user(self, message: InputMessage, where: str) -> None:
        """Adds results of tools, and the texts between them."""
        blocks = _blocks(message, where)
        texts: list[str] = []
        place = _MessagePlace(f"{where}.content", where)
        for path, block in blocks:
            if isinstance(block, ToolResultBlock):
                if texts:
                    self.add_message("user", "\n".join(texts), place)
                    texts = []
                content = block.content if isinstance(block.content, str) else _joined(block.content)
                self.add_message("tool", content, _MessagePlace(f"{path}.content", path), block.tool_use_id)
            elif isinstance(block, TextBlock):
                texts.append(block.text)
            else:
                raise invalid(f"{path}.type", f"{block.type} is only for messages of the assistant")
        if texts or not blocks:
            self.add_message("user", "\n".join(texts), place)

    def add_assistant(self, message: InputMessage, where: str) -> None:
        """Adds an answer. Its text, reasoning and calls become one message."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[MessageToolCall] = []
        place = _MessagePlace(f"{where}.content", where)
        for path, block in _blocks(message, where):
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                arguments = json.dumps(block.input, ensure_ascii=False)
                calls.append(MessageToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=arguments)))
                place.calls.append(path)
            elif isinstance(block, ToolResultBlock):
                raise invalid(f"{path}.type", "tool_result is only for messages of the user")
        self.add_message("assistant", "".join(texts) if texts or not calls else None, place)
        last = self.messages[-1]
        last.reasoning_content = "".join(thoughts) or None
        last.tool_calls = calls or None


def as_chat(body: CountTokensRequest) -> ChatOfMessages:
    """Returns the equivalent request for /v1/chat/completions. Raises GatewayError."""
    conversation = _conversation(body)
    continues = conversation.messages[-1].role == "assistant"
    given: dict[str, Any] = {}
    if isinstance(body, MessagesRequest):
        given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "stream")}
        given |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    choice = body.tool_choice
    output = body.output_config
    chat = ChatRequest.model_construct(
        model=body.model,
        messages=conversation.messages,
        tools=_tools(body),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=_response_format(body),
        reasoning_effort=None if output is None else output.effort,
        chat_template_kwargs=_template_variables(body.thinking),
        thinking_token_budget=None if body.thinking is None else body.thinking.budget_tokens,
        continue_final_message=continues or None,
        **given,
    )
    return ChatOfMessages(chat, MessageNames(conversation.places))


def _conversation(body: CountTokensRequest) -> _Messages:
    """Puts instructions first. Many chat templates refuse a second message of them, so those at the beginning are
    merged."""
    found = _Messages()
    instructions: list[str] = []
    blocks = [body.system] if isinstance(body.system, str) else [block.text for block in body.system or ()]
    instructions += [text for text in blocks if text and not text.startswith(_BILLING)]
    for at, message in enumerate(body.messages):
        where = f"messages[{at}]"
        if message.role == "assistant":
            found.add_assistant(message, where)
        elif message.role == "user":
            found.add_user(message, where)
        elif not found.messages:
            instructions += _instructions(message, where)
        elif texts := _instructions(message, where):
            found.add_message("system", "\n".join(texts), _MessagePlace(f"{where}.content", where))
    found.join_texts()
    if not found.messages:
        raise invalid("messages", "must have a message of the user")
    if instructions:
        text = "\n".join(instructions)
        found.messages.insert(0, ChatRequestMessage(role="system", content=text))
        found.places.insert(0, _MessagePlace("system", "system"))
    return found


def _instructions(message: InputMessage, where: str) -> list[str]:
    """Returns the texts of a message of the system. Raises GatewayError."""
    blocks = _blocks(message, where)
    for path, block in blocks:
        if not isinstance(block, TextBlock):
            raise invalid(f"{path}.type", "must be text in a message of the system")
    return [block.text for _, block in blocks if block.text]


def _blocks(message: InputMessage, where: str) -> list[tuple[str, Any]]:
    """Returns the blocks of a message, with their paths."""
    if isinstance(message.content, str):
        return [(f"{where}.content", TextBlock(type="text", text=message.content))]
    return [(f"{where}.content[{at}]", block) for at, block in enumerate(message.content)]


def _joined(blocks: Sequence[TextBlock] | None) -> str:
    return "\n".join(block.text for block in blocks or ())


def _tools(body: CountTokensRequest) -> list[Tool] | None:
    """Returns the tools of the chat."""
    return [
        Tool(
            type="function",
            function=FunctionDefinition(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            ),
        )
        for tool in body.tools or ()
    ] or None


def _tool_choice(body: CountTokensRequest) -> str | dict[str, Any] | None:
    if body.tool_choice is None:
        return None
    kind, name = body.tool_choice.type, body.tool_choice.name
    if kind == "tool":
        if not name:
            raise invalid("tool_choice.name", "must name the tool to call")
        return {"type": "function", "function": {"name": name}}
    return {"auto": "auto", "any": "required", "none": "none"}[kind]


def _response_format(body: CountTokensRequest) -> ResponseFormat | None:
    wanted = None if body.output_config is None else body.output_config.format
    if wanted is None:
        return None
    return ResponseFormat.model_construct(
        type="json_schema", json_schema=JsonSchema.model_construct(json_schema=wanted.json_schema)
    )


def _template_variables(thinking: Thinking | None) -> Mapping[str, Any] | None:
    """Returns the variable by which most templates turn reasoning on and off. None leaves the template's default."""
    return None if thinking is None else {"enable_thinking": thinking.type != "disabled"}

"""Converts a Responses request to a chat: items become messages, and options get chat's names."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.clients.gateway.errors import invalid
from penstock.clients.gateway.field_names import CHAT_NAMES, Names, caller_name
from penstock.clients.gateway.requests.constraints import constraint_names
from penstock.clients.gateway.requests.custom_tools import custom_arguments
from penstock.clients.gateway.requests.response_tools import ResponseTools, full_name, response_tools
from penstock.clients.gateway.requests.sampling import sampling_names
from penstock.clients.gateway.requests.tool_choice import with_allowed_tools
from penstock.clients.gateway.schemas.chat import (
    ChatRequest,
    ChatRequestMessage,
    FunctionCall,
    MessageToolCall,
)
from penstock.clients.gateway.schemas.common import JsonSchema, ResponseFormat, SamplingBody
from penstock.clients.gateway.schemas.response_tools import AnyTool
from penstock.clients.gateway.schemas.responses import (
    AdditionalToolsItem,
    CallItem,
    CallOutputItem,
    CustomCallItem,
    InputItem,
    MessageItem,
    ReasoningItem,
    RefusalPart,
    ResponsesRequest,
    TextPart,
)


@dataclass(slots=True)
class _ItemPlace:
    """The position of a message in the request."""

    item: str
    text: str
    """The field with its text."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """The item of each call, and the field with its arguments."""


@dataclass(slots=True)
class _Conversation:
    """Messages of a chat."""

    messages: list[ChatRequestMessage] = field(default_factory=list)
    places: list[_ItemPlace] = field(default_factory=list)
    tools: list[tuple[str, AnyTool]] = field(default_factory=list)
    """The tools among the items, with their paths."""
    _instructions: list[str] = field(default_factory=list)
    """The texts of the first message, if it contains instructions."""
    _reasoning: list[str] = field(default_factory=list)
    """The assistant's reasoning before its next message or call."""

    def end(self) -> None:
        """Ends the conversation."""
        if self._instructions:
            self.messages[0].content = "\n\n".join(self._instructions)

    def add_message(self, role: str, content: str | None, item: str, text: str, call_id: str | None = None) -> None:
        """Adds a message; for ``item`` and ``text`` see ``_ItemPlace``. Instructions at the beginning become one
        message: many chat templates refuse a second one, and Codex sends several."""
        if content is not None and role in ("system", "developer") and len(self.messages) == bool(self._instructions):
            self._instructions.append(content)
            if len(self._instructions) > 1:
                return
        reasoning = "\n".join(self._reasoning) if role == "assistant" else ""
        self._reasoning.clear()
        self.messages.append(
            ChatRequestMessage(role=role, content=content, tool_call_id=call_id, reasoning_content=reasoning or None)
        )
        self.places.append(_ItemPlace(item, text))

    def add_item(self, item: InputItem, where: str) -> None:
        """Adds an item of the input, whose path is ``where``."""
        match item:
            case MessageItem():
                self.add_message(item.role, _text(item.content), where, f"{where}.content")
            case CallItem():
                self.add_call(_call(item, item.arguments), where, f"{where}.arguments")
            case CustomCallItem():
                self.add_call(_call(item, custom_arguments(item.input)), where, f"{where}.input")
            case CallOutputItem():
                self.add_message("tool", _text(item.output), where, f"{where}.output", item.call_id)
            case ReasoningItem():
                self.add_reasoning(part.text for part in item.content or item.summary or ())
            case AdditionalToolsItem():
                self.tools += [(f"{where}.tools[{i}]", tool) for i, tool in enumerate(item.tools)]

    def add_reasoning(self, texts: Iterable[str]) -> None:
        """Adds reasoning of the assistant; it belongs to the next item, and is dropped if that has another role."""
        self._reasoning += filter(None, texts)

    def add_call(self, call: MessageToolCall, item: str, arguments: str) -> None:
        """Adds a call. Text and calls of one answer are one message of a chat; reasoning between them starts a new
        message. ``arguments``: the field with the arguments."""
        if not self.messages or self.messages[-1].role != "assistant" or self._reasoning:
            self.add_message("assistant", None, item, item)
        last = self.messages[-1]
        if last.tool_calls is None:
            last.tool_calls = []
        last.tool_calls.append(call)
        self.places[-1].calls.append((item, arguments))


@dataclass(frozen=True, slots=True)
class ResponseNames:
    """The caller's names for the contract's fields. Holds no other part of the request."""

    _places: Sequence[_ItemPlace]
    _tool_places: Sequence[str]
    """The paths of the chat's tools."""
    _others: Names
    """The names of fields outside the conversation and the tools."""

    def caller_name(self, field: str) -> str:
        """The caller's name of a field of the contract."""
        name = self._path(field)
        return _EARLIER if name.startswith(_EARLIER) else name

    def _path(self, field: str) -> str:
        if (found := _MESSAGE.match(field)) is not None:
            place, rest = self._places[int(found[1])], field[found.end() :]
            if found[2] is None:
                name = {"content": place.text, "tool_call_id": f"{place.item}.call_id"}.get(found[3] or "")
                return (name or place.item + (f".{found[3]}" if found[3] else "")) + rest
            item, arguments = place.calls[int(found[2])]
            names = {"id": f"{item}.call_id", "name": f"{item}.name", "arguments_json": arguments}
            return names.get(found[3] or "", item) + rest
        if (found := _TOOL.match(field)) is not None:
            return self._tool_places[int(found[1])] + (".parameters" if found[2] else "") + field[found.end() :]
        return caller_name(field, self._others)


@dataclass(frozen=True, slots=True)
class ChatOfResponse:
    """A Responses request as a chat."""

    chat: ChatRequest
    tools: ResponseTools
    names: ResponseNames


_EARLIER = "previous_response_id"
"""The caller's name for the items of earlier turns."""
_MESSAGE = re.compile(r"(?:start\.)?chat\.messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?(?:\.(\w+))?")
_TOOL = re.compile(r"(?:start\.)?chat\.tools\[(\d+)\](?:\.function)?(\.parameters_json)?")
_NAMES: Names = (
    (r"sampling\.max_tokens", "max_output_tokens"),
    (r"chat\.messages", "input"),
    (r"chat\.tools", "tools"),
    (r"chat\.tool_choice", "tool_choice"),
    (r"chat\.template_variables_json", "chat_template_kwargs"),
    (r"chat", "input"),
)


def as_chat(body: ResponsesRequest, earlier: Sequence[InputItem] = ()) -> ChatOfResponse:
    """Returns the same request for /v1/chat/completions. ``earlier``: the items of the response that it continues, and
    of those before it. Raises GatewayError."""
    wants_logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())
    conversation = _conversation(body, earlier)
    given = [(f"tools[{at}]", tool) for at, tool in enumerate(body.tools or ())]
    tools = response_tools([*given, *conversation.tools], body.tool_choice)
    chat = ChatRequest.model_construct(
        **{name: getattr(body, name) for name in SamplingBody.model_fields},
        messages=conversation.messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=wants_logprobs or None,
        top_logprobs=body.top_logprobs,
        tools=tools.functions or None,
        tool_choice=tools.choice,
        response_format=_response_format(body),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        verbosity=body.text.verbosity if body.text is not None else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    chosen = with_allowed_tools(chat)
    tool_places = [tools.places[at] for at in chosen.indices]
    of_format = [(pattern, format_name(name)) for pattern, name in constraint_names(chosen.chat)]
    others = (*of_format, *_NAMES, *sampling_names(chosen.chat), *CHAT_NAMES)
    return ChatOfResponse(chosen.chat, tools, ResponseNames(conversation.places, tool_places, others))


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None:
        return None
    if wanted.type not in ("text", "json_object", "json_schema"):
        raise invalid("text.format.type", "must be text, json_object or json_schema")
    return ResponseFormat(
        type=wanted.type, json_schema=JsonSchema(schema=wanted.json_schema), schema=wanted.json_schema
    )


def _conversation(body: ResponsesRequest, earlier: Sequence[InputItem]) -> _Conversation:
    found = _Conversation()
    if body.instructions is not None:
        found.add_message("system", body.instructions, "instructions", "instructions")
    for item in earlier:
        found.add_item(item, _EARLIER)
    if isinstance(body.input, str):
        found.add_message("user", body.input, "input", "input")
    else:
        for at, item in enumerate(body.input):
            found.add_item(item, f"input[{at}]")
    found.end()
    return found


def _text(content: str | Sequence[TextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _call(item: CallItem | CustomCallItem, arguments: str) -> MessageToolCall:
    function = FunctionCall(name=full_name(item.name, item.namespace), arguments=arguments)
    return MessageToolCall(id=item.call_id, function=function)


def format_name(name: str) -> str:
    """The caller's name of a chat's ``response_format``, or of a part of it; other names are unchanged."""
    if not name.startswith("response_format"):
        return name
    return "text.format" + name.removeprefix("response_format").replace(".json_schema.schema", ".schema")

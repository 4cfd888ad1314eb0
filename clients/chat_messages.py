"""Converts a conversation, in the form of OpenAI's clients and chat templates, to the contract's ``Chat``."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired, Required, TypedDict

from google.protobuf.message import Message

import penstock.v1 as pb
from penstock.clients.errors import InvalidOption, shown


class CalledFunction(TypedDict):
    """A function and its arguments: an object, or the text that the model wrote."""

    name: str
    arguments: str | Mapping[str, Any]


class ToolCall(TypedDict, total=False):
    """A call that the model made."""

    id: str
    type: str
    """Always "function"."""
    function: Required[CalledFunction]


class ChatMessage(TypedDict):
    """One message of a conversation."""

    role: str
    """The author: "developer", "system", "user", "assistant", "tool", or another role that the chat template names."""
    content: NotRequired[str | None]
    """May be missing or None only if the message has ``tool_calls``."""
    tool_calls: NotRequired[Sequence[ToolCall]]
    """The calls in an answer of the assistant."""
    tool_call_id: NotRequired[str]
    """The call that a tool's message answers."""
    name: NotRequired[str]
    reasoning: NotRequired[str]
    """The assistant's reasoning before this answer."""
    reasoning_content: NotRequired[str]
    """Another name for ``reasoning``."""


class ChatOptions(TypedDict, total=False):
    """Options of a conversation. The contract's comments document their meanings, defaults and limits."""

    add_generation_prompt: bool | None
    tools: Iterable[Mapping[str, Any] | str] | None
    """Each in the form that chat templates expect, {"type": "function", "function": {"name", "description",
    "parameters"}}, or as JSON text."""
    template_variables: Mapping[str, Any] | str | None
    """Further variables of the template, such as {"enable_thinking": False}, or as JSON text."""
    tool_choice: str | Mapping[str, Any] | None
    """"auto", "none", "required", or a function: {"type": "function", "function": {"name": ...}}."""
    parallel_tool_calls: bool | None
    continue_final_message: bool | None


CHAT_OPTION_NAMES = frozenset(ChatOptions.__annotations__)

TOOL_CHOICE_MODES: Mapping[str, "pb.ToolChoiceMode.ValueType"] = {
    "auto": pb.TOOL_CHOICE_MODE_AUTO,
    "none": pb.TOOL_CHOICE_MODE_NONE,
    "required": pb.TOOL_CHOICE_MODE_REQUIRED,
}
"""OpenAI's names of the modes."""
_KEYS = frozenset(ChatMessage.__annotations__)
_CALL_KEYS = frozenset(ToolCall.__annotations__)
_TOOL_KEYS = frozenset({"type", "function"})
_FUNCTION_KEYS = frozenset({"name", "description", "parameters", "strict"})


def build_chat(messages: Sequence[ChatMessage], options: ChatOptions | None = None) -> pb.Chat:
    """Returns the conversation as a ``Chat``. Raises InvalidOption."""
    chat = pb.Chat()
    for index, message in enumerate(messages):
        _add_message(chat, message, f"messages[{index}]")
    for name, value in (options or {}).items():
        if value is not None:
            set_chat_option(chat, name, value)
    return chat


def set_chat_option(chat: pb.Chat, name: str, value: object) -> None:
    """Sets one of ChatOptions. Raises InvalidOption."""
    if name == "tools":
        if isinstance(value, Mapping | str | bytes) or not isinstance(value, Iterable):
            raise InvalidOption(name, f"expected a list of objects, got {shown(value)}")
        for index, tool in enumerate(value):
            _add_tool(chat, tool, f"tools[{index}]")
    elif name == "template_variables":
        chat.template_variables_json = _json(value, name)
    elif name == "tool_choice":
        _set_tool_choice(chat.tool_choice, value)
    elif not isinstance(value, bool):
        raise InvalidOption(name, f"expected true or false, got {shown(value)}")
    else:
        setattr(chat, name, value)


def _set_tool_choice(choice: pb.ToolChoice, value: object) -> None:
    if isinstance(value, str) and value in TOOL_CHOICE_MODES:
        choice.mode = TOOL_CHOICE_MODES[value]
        return
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        modes = ", ".join(f'"{mode}"' for mode in TOOL_CHOICE_MODES)
        raise InvalidOption("tool_choice", f"expected {modes} or a function, got {shown(value)}")
    _set_text(choice, "function", function["name"], "tool_choice")


def _add_message(chat: pb.Chat, message: ChatMessage, where: str) -> None:
    if not isinstance(message, Mapping) or "role" not in message or not {"content", "tool_calls"} & message.keys():
        raise InvalidOption(where, f"expected an object with role and content, got {shown(message)}")
    _refuse_others(message, _KEYS, where)
    added = chat.messages.add()
    _set_text(added, "role", message["role"], where)
    if message.get("content") is not None or not message.get("tool_calls"):
        _set_text(added, "content", message.get("content"), where)
    for name in ("tool_call_id", "name", "reasoning", "reasoning_content"):
        if message.get(name) is not None:
            _set_text(added, name.removesuffix("_content"), message[name], where)
    for index, call in enumerate(_list(message.get("tool_calls"), f"{where}.tool_calls")):
        _add_call(added, call, f"{where}.tool_calls[{index}]")


def _add_call(message: pb.ChatMessage, call: Any, where: str) -> None:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidOption(where, f"expected an object with a function, got {shown(call)}")
    _refuse_others(call, _CALL_KEYS, where)
    if call.get("type", "function") != "function":
        raise InvalidOption(f"{where}.type", f"expected function, got {shown(call['type'])}")
    added = message.tool_calls.add()
    if call.get("id") is not None:
        _set_text(added, "id", call["id"], where)
    function = call["function"]
    _set_text(added, "name", function.get("name"), f"{where}.function")
    added.arguments_json = _json(function.get("arguments") or {}, f"{where}.function.arguments")


def _add_tool(chat: pb.Chat, tool: Any, where: str) -> None:
    if isinstance(tool, str):
        tool = _parsed(tool, where)
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        raise InvalidOption(where, f"expected an object with a function, got {shown(tool)}")
    _refuse_others(tool, _TOOL_KEYS, where)
    if tool.get("type", "function") != "function":
        raise InvalidOption(f"{where}.type", f"expected function, got {shown(tool['type'])}")
    function, where = tool["function"], f"{where}.function"
    _refuse_others(function, _FUNCTION_KEYS, where)
    added = chat.tools.add().function
    _set_text(added, "name", function.get("name"), where)
    if function.get("description") is not None:
        _set_text(added, "description", function["description"], where)
    if function.get("parameters") is not None:
        added.parameters_json = _json(function["parameters"], f"{where}.parameters")
    if function.get("strict") is not None:
        if not isinstance(function["strict"], bool):
            raise InvalidOption(f"{where}.strict", f"expected true or false, got {shown(function['strict'])}")
        added.strict = function["strict"]


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidOption(where, f"not valid JSON: {error}") from None


def _refuse_others(given: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    for name in given:
        if name not in known:
            raise InvalidOption(f"{where}.{name}", f"unknown field; the fields are {', '.join(sorted(known))}")


def _list(value: Any, where: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidOption(where, f"expected a list of calls, got {shown(value)}")
    return value


def _json(value: object, where: str) -> str:
    """Returns an object as JSON text; accepts text, which is returned unchanged."""
    if not isinstance(value, Mapping | str):
        raise InvalidOption(where, f"expected an object, got {shown(value)}")
    try:
        text = value if isinstance(value, str) else json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOption(where, f"not valid JSON: {error}") from None
    return text


def _set_text(message: Message, name: str, value: object, where: str) -> None:
    if not isinstance(value, str):
        raise InvalidOption(f"{where}.{name}", f"expected text, got {shown(value)}")
    try:
        setattr(message, name, value)
    except ValueError as error:  # half of a surrogate pair
        raise InvalidOption(where, str(error)) from None

"""Converts a ``Chat`` to a chat template's input: parses JSON texts and makes checks beyond the fields' rules."""

import json
import json.scanner
from collections.abc import Mapping
from typing import Any, NoReturn

import penstock.v1 as pb
from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage, TemplateToolCall
from penstock.service.chat_templates.chat_template import ChatTemplate
from penstock.service.config.limits import chat_bytes
from penstock.service.config.text_size import MAX_TEXT_BYTES, utf8_bytes
from penstock.service.errors import Reason, ServiceError, invalid
from penstock.service.parsers.base import Schema

MAX_JSON_DEPTH = 64
"""The deepest nesting of objects and lists."""
_LONG_CHARS = 32 << 10
"""Longer texts are parsed by json's Python code. Its C code holds Python's lock until it is done, which blocks the
event loop: 0.1 s for 4 MiB of short lists."""
_SET_BY_FIELDS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


def shows_tools(chat: pb.Chat) -> bool:
    """Whether the model sees the tools of a chat."""
    return bool(chat.tools) and chat.tool_choice.mode != pb.TOOL_CHOICE_MODE_NONE


def chat_options(chat: pb.Chat) -> pb.Chat:
    """Returns the options that determine how the template shows further messages of a chat."""
    options = pb.Chat(template_variables_json=chat.template_variables_json)
    if shows_tools(chat):
        options.tools.extend(chat.tools)
    return options


def with_options(chat: pb.Chat, options: pb.Chat) -> pb.Chat:
    """Returns a chat with the ``options`` of another one, unless it has its own."""
    filled = pb.Chat()
    filled.CopyFrom(chat)
    if not chat.tools:
        filled.tools.extend(options.tools)
    if not chat.template_variables_json:
        filled.template_variables_json = options.template_variables_json
    return filled


def check_chat(chat: pb.Chat, template: ChatTemplate) -> None:
    """Makes all checks that need no parsing. ``template`` is the one that will render the chat. Raises ServiceError."""
    if shows_tools(chat) and not template.shows_tools:
        raise ServiceError(Reason.NO_TOOLS_IN_TEMPLATE, field="chat.tools")
    for index, message in enumerate(chat.messages):
        if message.role not in template.roles:
            raise invalid(f"chat.messages[{index}].role", f"must be one of {', '.join(sorted(template.roles))}")
    _check_contents(chat)
    if chat.tools and (total := chat_bytes(chat.messages) + _tool_bytes(chat)) > MAX_TEXT_BYTES:
        raise invalid("chat.tools", f"at most {MAX_TEXT_BYTES:,} bytes together with the messages; they have {total:,}")
    if not chat.continue_final_message:
        return
    field = "chat.continue_final_message"
    if chat.add_generation_prompt:
        raise invalid(field, "not together with add_generation_prompt, which starts another turn")
    last = chat.messages[-1]
    if last.role != "assistant" or not content_text(last) or last.tool_calls:
        raise invalid(field, "the last message must be the assistant's, with content and without tool_calls")


class ToolSchemas:
    """The schemas of a chat's tools, each parsed only once, when it is first needed: the template, the grammar of calls
    and the output parser share them. They must not be changed."""

    def __init__(self, chat: pb.Chat) -> None:
        self._functions = [tool.function for tool in chat.tools]
        self._known: dict[int, Schema | None] = {}

    def of(self, index: int) -> Schema | None:
        """Returns the schema of a tool's arguments, by its number in the chat; None if it has none. Raises
        ServiceError."""
        if index not in self._known:
            function, field = self._functions[index], f"chat.tools[{index}].function.parameters_json"
            has_schema = function.HasField("parameters_json")
            self._known[index] = parse_object(function.parameters_json, field) if has_schema else None
        return self._known[index]

    def by_name(self) -> dict[str, Schema | None]:
        """Returns all schemas by the names of the tools. Raises ServiceError."""
        return {function.name: self.of(index) for index, function in enumerate(self._functions)}


def parse_chat(chat: pb.Chat, schemas: ToolSchemas | None = None) -> TemplateInput:
    """Returns the template's input for ``chat``, which has passed ``check_chat``. Slow for long texts. ``schemas`` are
    those of its tools, if others need them too. Raises ServiceError."""
    schemas = schemas or ToolSchemas(chat)
    messages = [
        TemplateMessage(
            message.role,
            content_text(message) if _has_content(message) or not message.tool_calls else None,
            [TemplateToolCall(call.id, call.name, _arguments(call.arguments_json)) for call in message.tool_calls],
            message.tool_call_id,
            message.name,
            message.reasoning if message.HasField("reasoning") else None,
        )
        for message in chat.messages
    ]
    opens_turn = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    return TemplateInput(
        messages,
        add_generation_prompt=opens_turn and not chat.continue_final_message,
        tools=[_tool(tool.function, schemas.of(index)) for index, tool in enumerate(chat.tools)]
        if shows_tools(chat)
        else [],
        variables=_variables(chat.template_variables_json),
        continue_final_message=chat.continue_final_message,
    )


def content_text(message: pb.ChatMessage) -> str:
    """Returns the text of a message: its content, or the texts of the parts as lines."""
    if not message.content_parts:
        return message.content
    return "\n".join([part.text for part in message.content_parts])


def _has_content(message: pb.ChatMessage) -> bool:
    return message.HasField("content") or bool(message.content_parts)


def _check_contents(chat: pb.Chat) -> None:
    for index, message in enumerate(chat.messages):
        if not message.content_parts:
            continue
        field = f"chat.messages[{index}].content_parts"
        if message.HasField("content"):
            raise invalid(field, "not together with content; set one of them")
        for at, part in enumerate(message.content_parts):
            if part.WhichOneof("part") is None:
                raise invalid(f"{field}[{at}]", "is empty; set text")


def _tool_bytes(chat: pb.Chat) -> int:
    functions = [tool.function for tool in chat.tools]
    texts = ((each.name, each.description, each.parameters_json) for each in functions)
    return sum(utf8_bytes(text) for some in texts for text in some)


def _tool(function: pb.FunctionTool, parameters: Schema | None) -> Mapping[str, Any]:
    """Returns a tool in the form that templates expect."""
    described: dict[str, Any] = {"name": function.name}
    if function.HasField("description"):
        described["description"] = function.description
    if parameters is not None:
        described["parameters"] = parameters
    return {"type": "function", "function": described}


def _variables(text: str) -> Mapping[str, Any]:
    field = "chat.template_variables_json"
    variables = parse_object(text or "{}", field)
    for name in sorted(_SET_BY_FIELDS & variables.keys()):
        raise invalid(field, f"{name} has its own field; set that")
    return variables


def _arguments(text: str) -> Mapping[str, Any] | str:
    """Returns a call's arguments; the text itself if the model wrote something else than an object, as it may."""
    try:
        return parse_object(text or "{}", "arguments_json")
    except ServiceError:
        return text


def parse_object(text: str, field: str) -> Mapping[str, Any]:
    """Parses a JSON object. Raises ServiceError."""
    try:
        value = _parsed(text)
        is_deep = isinstance(value, dict | list) and _is_deep(value)
        if not is_deep and "\\u" in text:  # may be half of a surrogate pair, which is not valid text
            for part in json.JSONEncoder(ensure_ascii=False).iterencode(value):
                part.encode()
    except RecursionError:
        is_deep = True
    except ValueError:
        raise invalid(field, "must be the JSON text of an object") from None
    if is_deep:
        raise invalid(field, f"objects and lists must be nested at most {MAX_JSON_DEPTH} deep")
    if not isinstance(value, dict):
        raise invalid(field, "must be the JSON text of an object")
    return value


def _parsed(text: str) -> Any:
    """Raises ValueError and RecursionError."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    if len(text) > _LONG_CHARS:
        decoder.scan_once = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]
    return decoder.decode(text)


def _refuse(constant: str) -> NoReturn:
    """Refuses NaN and infinities, which are not valid JSON."""
    raise ValueError


def _is_deep(value: dict[str, Any] | list[Any]) -> bool:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        items = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in items if isinstance(item, dict | list)]
    return bool(level)

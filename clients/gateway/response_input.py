"""A Responses request as the chat that it is: items become messages, and options have chat's names."""

from collections.abc import Sequence

from penstock.clients.gateway.errors import invalid
from penstock.clients.gateway.schemas_chat import (
    CalledFunction,
    ChatRequest,
    FunctionTool as ChatFunction,
    JsonSchema,
    Message,
    MessageToolCall,
    ResponseFormat,
    Tool,
)
from penstock.clients.gateway.schemas_common import SamplingBody
from penstock.clients.gateway.schemas_responses import (
    CallItem,
    CallOutputItem,
    FunctionTool,
    MessageItem,
    RefusalPart,
    ResponsesRequest,
    TextPart,
)

RENAMED = {
    "chat": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "template_variables": "chat_template_kwargs",
    "logprobs": "top_logprobs",
}
"""The caller's names of the contract's fields."""


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The same request to /v1/chat/completions. Raises GatewayError."""
    wants_logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())
    return ChatRequest.model_construct(
        **{name: getattr(body, name) for name in SamplingBody.model_fields},
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=wants_logprobs or None,
        top_logprobs=body.top_logprobs,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_tool_choice(body),
        response_format=_response_format(body),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None:
        return None
    if wanted.type not in ("text", "json_object", "json_schema"):
        raise invalid("text.format.type", "must be text, json_object or json_schema")
    return ResponseFormat(type=wanted.type, json_schema=JsonSchema(schema=wanted.json_schema))


def _messages(body: ResponsesRequest) -> list[Message]:
    messages = [] if body.instructions is None else [_message("system", body.instructions)]
    if isinstance(body.input, str):
        return [*messages, _message("user", body.input)]
    for item in body.input:
        match item:
            case MessageItem():
                messages.append(_message(item.role, _text(item.content)))
            case CallItem():
                _add_call(messages, item)
            case CallOutputItem():
                messages.append(_message("tool", _text(item.output), call_id=item.call_id))
    return messages


def _message(role: str, content: str | None = None, call_id: str | None = None) -> Message:
    return Message(role=role, content=content, tool_call_id=call_id, reasoning_content=None)


def _text(content: str | Sequence[TextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _add_call(messages: list[Message], item: CallItem) -> None:
    """Text and calls of one answer are one message of a chat."""
    call = MessageToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
    if not messages or messages[-1].role != "assistant":
        messages.append(_message("assistant"))
    messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]


def _tool(tool: FunctionTool) -> Tool:
    function = ChatFunction(
        **tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
    )
    return Tool(type="function", function=function)


def _tool_choice(body: ResponsesRequest) -> str | dict[str, object] | None:
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice

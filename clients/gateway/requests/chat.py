"""Converts a chat request's body to the contract's ``GenerationStart``."""

import json
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers

import penstock.v1 as pb
from penstock.clients.constraints import STARTS
from penstock.clients.gateway.errors import invalid, renaming
from penstock.clients.gateway.field_names import CHAT_NAMES, Names
from penstock.clients.gateway.requests.constraints import (
    constraint_field,
    constraint_names,
    fill_constraint,
    is_constrained,
)
from penstock.clients.gateway.requests.resumption import check_resumed_echo
from penstock.clients.gateway.requests.sampling import (
    check_model,
    check_stream_fields,
    fill_output,
    fill_sampling,
    new_start,
    sampling_names,
)
from penstock.clients.gateway.requests.tool_choice import fill_tool_choice, forces_call
from penstock.clients.gateway.schemas.chat import (
    ChatRequest,
    ChatRequestMessage,
    ChatTextPart,
    FunctionDefinition,
)
from penstock.clients.gateway.schemas.common import TEXT_PARTS
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.v1 import RenderChatRequest


def check_chat(body: ChatRequest, caller: UpstreamCaller) -> None:
    """Raises GatewayError for unsupported options and invalid combinations."""
    check_stream_fields(body)
    check_model(body.model, caller)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "only with logprobs: true")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("max_tokens", "differs from max_completion_tokens, which means the same; send one of them")
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid("continue_final_message", "not with add_generation_prompt: true")
    if body.echo and not body.continue_final_message:
        raise invalid("echo", "only with continue_final_message: true")
    check_resumed_echo(body.resume_from, body.echo)


def build_chat_start(body: ChatRequest, headers: Headers, caller: UpstreamCaller) -> pb.GenerationStart:
    """Builds the request to the service. Raises GatewayError."""
    start = new_start(body, headers, caller.settings)
    start.chat.CopyFrom(build_chat(body))
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    fill_sampling(start.sampling, body, max_tokens)
    if body.thinking_token_budget is not None and body.thinking_token_budget >= 0:
        start.sampling.thinking_token_budget = body.thinking_token_budget
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    fill_output(start.output, body, logprobs, body.prompt_logprobs)
    start.output.parse_reasoning = True
    start.output.parse_tool_calls = uses_tools(body)
    if body.prediction is not None:
        start.prediction.text = content_text(body.prediction.content, "prediction", may_refuse=False)
    if forces_call(body):
        _check_forced(body)
    else:
        fill_constraint(start, body)
    if is_constrained(body) and body.constrained_decoding_start is not None:
        start.constraint.start = STARTS[body.constrained_decoding_start]
    return start


def _check_forced(body: ChatRequest) -> None:
    """Raises GatewayError for a constraint together with a forced call. A ``response_format`` is allowed unless it is a
    structural tag: it applies only to text, which such an answer does not have."""
    field = constraint_field(body)
    is_of_text = body.response_format is not None and body.response_format.type != "structural_tag"
    if field is not None and not (field == "response_format" and is_of_text):
        raise invalid("tool_choice", f"cannot force a call together with {field}: send one of them")


def build_chat(body: ChatRequest) -> pb.Chat:
    """Builds the conversation with its tools and the template's variables."""
    chat = pb.Chat()
    for at, message in enumerate(body.messages):
        _add_message(chat, message, f"messages[{at}]")
    if uses_tools(body):
        for tool in body.tools or ():
            _add_tool(chat, tool.function)
    fill_tool_choice(chat.tool_choice, body.tool_choice)
    if body.parallel_tool_calls is not None:
        chat.parallel_tool_calls = body.parallel_tool_calls
    if variables := template_variables(body):
        chat.template_variables_json = variables
    if body.continue_final_message:
        chat.continue_final_message = True
    elif body.add_generation_prompt is not None:
        chat.add_generation_prompt = body.add_generation_prompt
    return chat


async def rendered_ids(body: ChatRequest, caller: UpstreamCaller, renamed: Callable[[str], str]) -> Sequence[int]:
    """Returns the tokens of a conversation's prompt. ``renamed``: see ``from_failure``. Raises GatewayError."""
    with renaming(renamed):
        request = RenderChatRequest(chat=build_chat(body))
        return (await caller.call(caller.stubs.tokenizer.RenderChat, request)).token_ids


def uses_tools(body: ChatRequest) -> bool:
    """Whether the model may call tools."""
    return bool(body.tools) and body.tool_choice != "none"


def template_variables(body: ChatRequest) -> str:
    """Returns the template's variables for the contract; empty if there are none."""
    variables = dict(body.chat_template_kwargs or {})
    for name in ("reasoning_effort", "verbosity", "documents"):
        if (value := getattr(body, name)) is not None:
            variables.setdefault(name, value)
    return json.dumps(variables) if variables else ""


def max_tokens_name(body: ChatRequest) -> str:
    """The name of the field that the caller used for the limit."""
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def chat_names(body: ChatRequest) -> Names:
    """The caller's names for the contract's fields."""
    return (
        *constraint_names(body),
        (r"sampling\.max_tokens", max_tokens_name(body)),
        *sampling_names(body),
        *CHAT_NAMES,
    )


def _add_message(chat: pb.Chat, message: ChatRequestMessage, where: str) -> None:
    if message.function_call is not None:
        problem = "is not supported; send the call in tool_calls instead"
        raise invalid(f"{where}.function_call", problem, code="unsupported_parameter")
    content = message.content
    chat.messages.add(
        role=message.role,
        content=None if content is None else content_text(content, where, may_refuse=message.role == "assistant"),
        reasoning=message.reasoning if message.reasoning_content is None else message.reasoning_content,
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
            for call in message.tool_calls or ()
        ],
    )


def _add_tool(chat: pb.Chat, function: FunctionDefinition) -> None:
    parameters = function.parameters
    chat.tools.add().function.MergeFrom(
        pb.FunctionTool(
            name=function.name,
            description=function.description,
            parameters_json=None if parameters is None else json.dumps(parameters, ensure_ascii=False),
            strict=function.strict,
        )
    )


def content_text(content: str | list[ChatTextPart] | None, where: str, *, may_refuse: bool = True) -> str:
    """The text of a message, whose path is ``where``: its parts are lines. ``may_refuse``: whether it may have OpenAI's
    refusal parts, as an assistant's may. Raises GatewayError."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for at, part in enumerate(content):
        text = part.refusal if may_refuse and part.type == "refusal" else part.text
        if text is None or part.type not in TEXT_PARTS | {"refusal"}:
            raise invalid(f"{where}.content[{at}]", "must be text: other content is not supported")
        texts.append(text)
    return "\n".join(texts)

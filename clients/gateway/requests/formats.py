"""The formats of tool calls and reasoning in answers: set by the operator, or detected from the chat template.

A template that renders a call in a conversation's history reveals the model's format.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

import grpc

import penstock.v1 as pb
from penstock.clients.errors import RequestFailed
from penstock.clients.gateway.errors import invalid
from penstock.clients.gateway.parsers.base import AnswerParser
from penstock.clients.gateway.parsers.reasoning import REASONING_FORMATS
from penstock.clients.gateway.parsers.registry import make_parser, shows_special_tokens
from penstock.clients.gateway.parsers.tool_grammar import AnswerShape
from penstock.clients.gateway.requests.chat import content_text, template_variables, uses_tools
from penstock.clients.gateway.requests.constraints import is_constrained
from penstock.clients.gateway.requests.tool_choice import forces_call
from penstock.clients.gateway.schemas.chat import ChatRequest
from penstock.clients.gateway.settings import AUTO, NONE
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.v1 import RenderChatRequest, RenderChatResponse

_TOOL = pb.Tool(
    function=pb.FunctionTool(
        name="probe_tool",
        description="A tool.",
        parameters_json='{"type": "object", "properties": {"probe": {"type": "string"}}}',
    )
)
_CALL = pb.ToolCall(
    id="probecall", name="probe_tool", arguments_json='{"probe": "value"}'
)  # Mistral's ids have 9 letters
_SHOWN_CALLS = {
    "mistral": re.compile(r"\[TOOL_CALLS\]"),
    "hermes": re.compile(r'<tool_call>\s*\{"name":\s*"probe_tool"'),
    "pythonic": re.compile(r"\[probe_tool\("),
    "llama3_json": re.compile(r'\{"name":\s*"probe_tool",\s*"parameters":\s*\{"probe"'),
}
"""For each format, how a call looks in a rendered conversation."""
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """The formats in an answer; None if unknown or absent."""

    tool: str | None
    reasoning: str | None
    in_reasoning: bool
    """Whether the prompt opens the reasoning already."""


async def parser_maker(body: ChatRequest, caller: UpstreamCaller) -> tuple[Callable[[], AnswerParser], bool]:
    """Returns a factory of parsers, one for each choice, and whether the text must include special tokens. Raises
    GatewayError and RequestFailed."""
    formats = await formats_of(body, caller)
    tool = formats.tool if uses_tools(body) else None
    if uses_tools(body) and tool is None:
        raise invalid(
            "tools",
            "the format of this model's calls is unknown; the gateway's operator can set it with --tool-call-parser",
        )
    make = partial(
        make_parser,
        tool,
        formats.reasoning,
        tool_names=frozenset(each.function.name for each in body.tools or ()),
        in_reasoning=formats.in_reasoning,
        parallel_calls=body.parallel_tool_calls is not False,
        only_calls=forces_call(body),
    )
    return make, shows_special_tokens(tool, formats.reasoning)


async def formats_of(body: ChatRequest, caller: UpstreamCaller) -> OutputFormats:
    """Returns the formats for a request. Renders the template once per minute for each set of variables. Raises
    GatewayError and RequestFailed."""
    tool, reasoning, opened = caller.settings.tool_call_parser, caller.settings.reasoning_parser, False
    if tool == AUTO:
        tool = await _tool_format(caller) if uses_tools(body) else NONE
    if reasoning == AUTO:
        reasoning = await _reasoning_format(caller, uses_tools(body))
    if reasoning != NONE and body.continue_final_message:
        last = content_text(body.messages[-1].content, f"messages[{len(body.messages) - 1}]")
        opened = REASONING_FORMATS[reasoning].is_open_in(last)
    elif reasoning != NONE and body.add_generation_prompt is not False:
        prompt = await _prompt(caller, template_variables(body), uses_tools(body))
        opened = prompt.text.rstrip().endswith(REASONING_FORMATS[reasoning].opens)
    if body.constrained_decoding_start == "first_token" and is_constrained(body):
        opened = False
    return OutputFormats(_or_none(tool), _or_none(reasoning), opened)


async def answer_shape(formats: OutputFormats, caller: UpstreamCaller) -> AnswerShape:
    """Returns the properties of a model's answers for a grammar. Raises RequestFailed."""
    call, prompt = await _shown_call(caller), await _prompt(caller, "", True)
    specials: dict[str, int] = {}
    if shows_special_tokens(formats.tool, formats.reasoning):
        ids = {*call.token_ids, *prompt.token_ids}
        known = await caller.describe(ids)
        specials = {known[each].text.decode(errors="replace"): each for each in ids if known[each].is_special}
    # The service detects the template's reasoning itself, and starts a constraint after it.
    reasoning = None if caller.settings.reasoning_parser == AUTO else formats.reasoning
    return AnswerShape(call.text, specials, reasoning, formats.in_reasoning)


async def _tool_format(caller: UpstreamCaller) -> str:
    text = (await _shown_call(caller)).text
    return next((name for name, shown in _SHOWN_CALLS.items() if shown.search(text)), NONE)


async def _shown_call(caller: UpstreamCaller) -> RenderChatResponse:
    messages = [
        pb.ChatMessage(role="user", content="question"),
        pb.ChatMessage(role="assistant", tool_calls=[_CALL]),
        pb.ChatMessage(role="tool", content="answer", tool_call_id=_CALL.id, name=_CALL.name),
    ]
    return await _rendered(caller, pb.Chat(messages=messages, tools=[_TOOL]))


async def _reasoning_format(caller: UpstreamCaller, with_tools: bool) -> str:
    # Templates that do not open reasoning render an empty one if it is disabled.
    variables = ("", '{"enable_thinking": false}')
    text = "".join([(await _prompt(caller, each, with_tools)).text for each in variables])
    return next((name for name, form in REASONING_FORMATS.items() if form.opens in text), NONE)


async def _prompt(caller: UpstreamCaller, variables: str, with_tools: bool) -> RenderChatResponse:
    """Renders a short conversation: a model may have a separate template for tools."""
    message = pb.ChatMessage(role="user", content="question")
    tools = [_TOOL] if with_tools else []
    return await _rendered(caller, pb.Chat(messages=[message], template_variables_json=variables, tools=tools))


async def _rendered(caller: UpstreamCaller, chat: pb.Chat) -> RenderChatResponse:
    """Renders a conversation; returns an empty prompt if the template refuses it."""
    key = sha256(chat.SerializeToString(deterministic=True)).digest()  # variables may be as long as a body
    prompt = caller.rendered.get(key)
    if prompt is None:
        try:
            prompt = await caller.call(caller.stubs.tokenizer.RenderChat, RenderChatRequest(chat=chat))
        except RequestFailed as failure:
            if failure.code not in _REFUSED:
                raise
            prompt = RenderChatResponse()
        caller.rendered[key] = prompt
    return prompt


def _or_none(name: str) -> str | None:
    return None if name == NONE else name

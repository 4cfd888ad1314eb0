"""Constrains calls by a grammar: calls that ``tool_choice`` forces, and calls of ``strict`` tools."""

import penstock.v1 as pb
from penstock.clients.gateway.errors import invalid
from penstock.clients.gateway.parsers.harmony import HARMONY
from penstock.clients.gateway.parsers.lark_grammar import CallableTool, CannotBeHeld
from penstock.clients.gateway.parsers.tool_grammar import MARKED_FORMATS, call_grammar, text_grammar
from penstock.clients.gateway.requests.chat import uses_tools
from penstock.clients.gateway.requests.constraints import constraint_field
from penstock.clients.gateway.requests.formats import answer_shape, formats_of
from penstock.clients.gateway.requests.tool_choice import forces_call, named_function
from penstock.clients.gateway.schemas.chat import ChatRequest, FunctionDefinition
from penstock.clients.gateway.settings import AUTO
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.v1 import CONSTRAINT_START_FIRST_TOKEN


async def fill_calls(start: pb.GenerationStart, body: ChatRequest, caller: UpstreamCaller) -> None:
    """Constrains the answer to calls if ``tool_choice`` requires one; ``response_format`` applies only to text, which
    such an answer does not have. Otherwise constrains the calls of strict tools to their schemas, if a marker
    distinguishes calls from text. Raises GatewayError, and RequestFailed."""
    name = _forced_tool(body)
    given = [each.function for each in body.tools or ()]
    if name is not None:
        field = constraint_field(body)
        if field not in (None, "response_format"):
            raise invalid("tool_choice", f"cannot force a call together with {field}: send one of them")
        tools = [_held(tool) for tool in given if name in ("", tool.name)]
        if not tools:
            raise invalid("tool_choice", "names a function that is not among the tools")
    elif uses_tools(body) and any(tool.strict for tool in given) and not start.HasField("constraint"):
        tools = [_held(tool) if tool.strict else CallableTool(tool.name, None) for tool in given]
    else:
        return
    formats = await formats_of(body, caller)
    assert formats.tool is not None, "a request with tools and an unknown format is refused earlier"
    if name is None and formats.tool not in MARKED_FORMATS:
        return
    one = body.parallel_tool_calls is False or bool(name)
    write = text_grammar if name is None else call_grammar
    try:
        start.constraint.lark = write(formats.tool, tools, one=one, shape=await answer_shape(formats, caller))
    except CannotBeHeld as error:
        raise invalid("tools", str(error)) from None
    if (
        formats.reasoning == HARMONY
        or caller.settings.reasoning_parser != AUTO
        or body.constrained_decoding_start == "first_token"
    ):
        start.constraint.start = CONSTRAINT_START_FIRST_TOKEN


def _held(tool: FunctionDefinition) -> CallableTool:
    return CallableTool(tool.name, tool.parameters)


def _forced_tool(body: ChatRequest) -> str | None:
    """Returns the name of the function that must be called; empty: any; None: no call is required. Raises
    GatewayError."""
    if not forces_call(body):
        return None
    if not body.tools:
        raise invalid("tool_choice", "needs tools, of which one is called")
    if body.tool_choice == "required":
        return ""
    name = named_function(body.tool_choice)
    if not name:
        raise invalid(
            "tool_choice",
            'must be "auto", "none", "required", a function, {"type", "function": {"name"}}, or allowed_tools, '
            '{"type", "allowed_tools": {"mode", "tools"}}',
        )
    return name

"""Answers that must be calls: ``tool_choice`` "required", or a function by its name."""

from penstock.clients.gateway.errors import invalid
from penstock.clients.gateway.formats import formats_of
from penstock.clients.gateway.schemas_chat import ChatRequest
from penstock.clients.gateway.service_link import Caller
from penstock.clients.gateway.tool_grammar import GRAMMARS, call_grammar
from penstock.v1 import generation_pb2 as pb


async def fill_calls(start: pb.Start, body: ChatRequest, caller: Caller) -> None:
    """Holds the answer to calls where ``tool_choice`` asks for one. Raises GatewayError, and RequestFailed."""
    name = forced_tool(body)
    if name is None:
        return
    formats = await formats_of(body, caller)
    tool_format = formats.tool
    if start.HasField("constraint"):
        raise invalid("tool_choice", "one that forces a call does not go together with another form of the answer")
    if tool_format is None or tool_format not in GRAMMARS:
        problem = f"cannot force a call in this model's format, only in {' and '.join(sorted(GRAMMARS))}: send auto"
        raise invalid("tool_choice", problem, code="unsupported_parameter")
    tools = [each.function for each in body.tools or () if name in ("", each.function.name)]
    if not tools:
        raise invalid("tool_choice", "names a function that is not among the tools")
    one = body.parallel_tool_calls is False or name != ""
    start.constraint.lark = call_grammar(
        tool_format,
        [(each.name, each.parameters) for each in tools],
        one=one,
        reasoning=formats.reasoning,
        in_reasoning=formats.in_reasoning,
    )


def forced_tool(body: ChatRequest) -> str | None:
    """The name of the function that must be called; empty: any; None: none need be. Raises GatewayError."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return None
    if not body.tools:
        raise invalid("tool_choice", "needs tools, of which one is called")
    if choice == "required":
        return ""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise invalid("tool_choice", 'must be "auto", "none", "required" or a function, {"type", "function": {"name"}}')
    return name

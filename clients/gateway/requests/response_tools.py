"""Converts the tools of a Responses request to functions of a chat, and maps functions back to the caller's tools."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.clients.gateway.errors import GatewayError, invalid
from penstock.clients.gateway.requests.custom_tools import custom_function
from penstock.clients.gateway.requests.tool_choice import ALLOWED_MODES
from penstock.clients.gateway.schemas.chat import FunctionDefinition as ChatFunction, Tool
from penstock.clients.gateway.schemas.common import MAX_TOOLS
from penstock.clients.gateway.schemas.response_tools import (
    AnyTool,
    CustomTool,
    FunctionTool,
    HostedTool,
    NamespaceTool,
    is_hosted,
)
from penstock.clients.gateway.schemas.unsupported import shown

Choice = str | dict[str, Any] | None
_SingleTool = FunctionTool | CustomTool | HostedTool


@dataclass(frozen=True, slots=True)
class CallerTool:
    """A function or custom tool as the caller named it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(slots=True)
class ResponseTools:
    """The tools that the model may call."""

    functions: list[Tool] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """The path of each function in the request."""
    callers: dict[str, CallerTool] = field(default_factory=dict)
    """The caller's tools by the names that the model knows."""
    hosted: set[str] = field(default_factory=set)
    """The types of hosted tools in the request, which are not offered to the model."""
    choice: Choice = None
    """``tool_choice`` of the chat."""

    def named(self, name: str) -> CallerTool:
        """Finds the tool of a model's call. A tool in a namespace may be called by its own name if that is unique."""
        if (found := self.callers.get(name)) is not None:
            return found
        same = [tool for tool in self.callers.values() if tool.name == name]
        return same[0] if len(same) == 1 else CallerTool(name)


def full_name(name: str, namespace: str | None) -> str:
    """The name of a function for the model. Other servers join the two parts in the same way."""
    return name if namespace is None else f"{namespace}__{name}"


def response_tools(given: Sequence[tuple[str, AnyTool]], choice: Choice) -> ResponseTools:
    """Converts ``given``, the tools of a request with their paths in it. Raises GatewayError."""
    found = ResponseTools()
    for place, tool, namespace in _flat(given):
        if isinstance(tool, HostedTool):
            found.hosted.add(tool.type)
            continue
        name = full_name(tool.name, namespace)
        found.functions.append(Tool(type="function", function=_function(tool, name)))
        found.places.append(place)
        found.callers.setdefault(name, CallerTool(tool.name, namespace, isinstance(tool, CustomTool)))
    found.choice = _choice(choice, found)
    return found


def _flat(given: Sequence[tuple[str, AnyTool]]) -> Iterator[tuple[str, _SingleTool, str | None]]:
    for place, tool in given:
        if isinstance(tool, NamespaceTool):
            for at, member in enumerate(tool.tools):
                assert isinstance(member, FunctionTool | CustomTool), "other members are refused by the schema"
                yield f"{place}.tools[{at}]", member, tool.name
        else:
            assert isinstance(tool, _SingleTool), "unknown tools are refused by the schema"
            yield place, tool, None


def _function(tool: FunctionTool | CustomTool, name: str) -> ChatFunction:
    if isinstance(tool, FunctionTool):
        given = tool.model_dump(include={"description", "parameters", "strict"}, exclude_none=True)
        return ChatFunction(name=name, **given)
    form = tool.format
    syntax, definition = (None, None) if form is None else (form.syntax, form.definition)
    return ChatFunction(**custom_function(name, tool.description, syntax, definition))


def _choice(choice: Choice, tools: ResponseTools) -> Choice:
    """Converts the choice to chat's form. Raises GatewayError."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        named = choice.get("tools")
        if not isinstance(named, list) or len(named) > MAX_TOOLS:
            raise invalid("tool_choice.tools", f"must be a list of at most {MAX_TOOLS} tools, each {{type, name}}")
        if choice.get("mode") not in ALLOWED_MODES:
            raise invalid("tool_choice.mode", 'must be "auto" or "required"')
        names = [name for at, each in enumerate(named) for name in _allowed(each, tools, f"tool_choice.tools[{at}]")]
        allowed = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
    if is_hosted(kind):
        problem = f"{shown(str(kind))} is a tool that this service does not run; choose a function, or leave it out"
        raise invalid("tool_choice", problem, code="unsupported_parameter")
    return {"type": "function", "function": {"name": _chosen(choice, tools, "tool_choice")}}


def _allowed(given: Any, tools: ResponseTools, where: str) -> list[str]:
    """Returns the model's names for an item of allowed_tools; none for a hosted tool. Raises GatewayError."""
    kind = given.get("type") if isinstance(given, dict) else None
    if is_hosted(kind):
        return []
    if kind != "namespace":
        return [_chosen(given, tools, where)]
    members = [name for name, tool in tools.callers.items() if tool.namespace == given.get("name")]
    if not members:
        raise _not_found(where, ())
    return members


def _chosen(choice: Any, tools: ResponseTools, where: str) -> str:
    """Returns the model's name of a chosen tool. Raises GatewayError."""
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        raise invalid(
            f"{where}.type" if isinstance(choice, dict) else where,
            'must be "auto", "none", "required", a function or custom tool, {type, name}, or allowed_tools, {type, '
            "mode, tools}",
        )
    name, namespace = choice.get("name"), choice.get("namespace")
    if not isinstance(name, str) or not name:
        raise invalid(f"{where}.name", "must be the name of one of the tools")
    full = full_name(name, namespace if isinstance(namespace, str) else None)
    if full in tools.callers:
        return full
    same = [each for each, tool in tools.callers.items() if tool.name == name and namespace in (None, tool.namespace)]
    if len(same) == 1:
        return same[0]
    raise _not_found(where, same)


def _not_found(where: str, same: Sequence[str]) -> GatewayError:
    if same:
        return invalid(where, f"is in more than one namespace; send its full name, such as {shown(same[0])}")
    return invalid(where, "names a tool that is not among the tools")

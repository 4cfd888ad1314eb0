"""Reads a chat's ``tool_choice``, and reduces the tools to those that ``allowed_tools`` names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import penstock.v1 as pb
from penstock.clients.chat_messages import TOOL_CHOICE_MODES
from penstock.clients.gateway.errors import invalid
from penstock.clients.gateway.field_names import Names
from penstock.clients.gateway.schemas.chat import ChatRequest
from penstock.clients.gateway.schemas.common import MAX_TOOLS

ALLOWED_MODES = ("auto", "required")


def forces_call(body: ChatRequest) -> bool:
    """Whether the answer must be a call."""
    return body.tool_choice not in (None, "auto", "none")


def named_function(choice: Any) -> str | None:
    """Returns the name in ``{"type": "function", "function": {"name": ...}}``; None for anything else."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def fill_tool_choice(choice: pb.ToolChoice, given: Any) -> None:
    """Fills the contract's choice; None leaves it unset. Raises GatewayError."""
    if given is None:
        return
    if isinstance(given, str) and given in TOOL_CHOICE_MODES:
        choice.mode = TOOL_CHOICE_MODES[given]
        return
    name = named_function(given)
    if not name:
        raise invalid(
            "tool_choice",
            'must be "auto", "none", "required", a function, {"type", "function": {"name"}}, or allowed_tools, '
            '{"type", "allowed_tools": {"mode", "tools"}}',
        )
    choice.function = name


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """A chat with only the allowed tools."""

    chat: ChatRequest
    indices: Sequence[int]
    """The index in the request of each allowed tool."""

    @property
    def names(self) -> Names:
        """The caller's names for the contract's tools."""
        moved = [(at, index) for at, index in enumerate(self.indices) if at != index]
        schemas = [
            (rf"chat\.tools\[{at}\]\.function\.parameters_json", f"tools[{index}].function.parameters")
            for at, index in moved
        ]
        return [*schemas, *((rf"chat\.tools\[{at}\]", f"tools[{index}]") for at, index in moved)]


def with_allowed_tools(body: ChatRequest) -> AllowedTools:
    """Returns the request with only the tools that ``allowed_tools`` names; its mode becomes the choice. The model does
    not see the others, so it does not call them. Raises GatewayError."""
    choice = body.tool_choice
    given = list(body.tools or ())
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return AllowedTools(body, range(len(given)))
    where = "tool_choice" if "tools" in choice else "tool_choice.allowed_tools"  # smg sends the first form
    allowed = choice if "tools" in choice else choice.get("allowed_tools")
    mode, names = _read(allowed if isinstance(allowed, dict) else {}, where)
    known = {tool.function.name for tool in given}
    for at, name in enumerate(names):
        if name not in known:
            raise invalid(f"{where}.tools[{at}]", "names a tool that is not among the tools")
    indices = [at for at, tool in enumerate(given) if tool.function.name in names]
    if mode == "required" and not indices:
        raise invalid("tool_choice", "requires a call, but allows no tool that this service can offer")
    tools = [given[at] for at in indices]
    return AllowedTools(
        body.model_copy(update={"tools": tools or None, "tool_choice": mode if tools else None}), indices
    )


def _read(allowed: dict[str, Any], where: str) -> tuple[str, list[str]]:
    """Returns the mode and the names. Raises GatewayError."""
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ALLOWED_MODES:
        raise invalid(f"{where}.mode", 'must be "auto" or "required"')
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise invalid(f"{where}.tools", f"must be a list of at most {MAX_TOOLS} tools")
    return mode, [_name(tool, f"{where}.tools[{at}]") for at, tool in enumerate(tools)]


def _name(tool: Any, where: str) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(where, 'must be a function, {"type", "function": {"name"}}')
    return name

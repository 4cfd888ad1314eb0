"""The tool calls of an output: whole, or as parts that arrive one after another."""

from collections.abc import Iterable
from dataclasses import dataclass

import penstock.v1 as pb


@dataclass(slots=True)
class CalledTool:
    """A tool call that the model made."""

    id: str
    name: str
    arguments: str = ""
    """The JSON text of an object, unless the output ended within it."""


@dataclass(slots=True)
class ToolCallPart:
    """A part of a tool call. Only a call's first part has ``id``, ``name`` and ``text_offset``."""

    index: int
    """The number of the call in its choice, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """More of the arguments' JSON text."""
    text_offset: int = 0
    """How many characters of the choice's text precede the call."""
    is_incomplete: bool = False
    """Whether the arguments end here incomplete."""

    @classmethod
    def from_proto(cls, message: pb.ToolCallDelta) -> "ToolCallPart":
        return cls(
            message.index, message.id, message.name, message.arguments_json, message.text_offset, message.is_incomplete
        )


def append_parts(parts: list[ToolCallPart], more: Iterable[ToolCallPart]) -> None:
    """Appends parts of calls. A part of the last call is merged into it."""
    for part in more:
        if parts and parts[-1].index == part.index:
            parts[-1].arguments += part.arguments
            parts[-1].is_incomplete = part.is_incomplete
        else:
            parts.append(part)


def whole_calls(parts: Iterable[ToolCallPart]) -> list[CalledTool]:
    """Combines all parts of the calls of one choice."""
    calls: list[CalledTool] = []
    arguments: list[list[str]] = []
    for part in parts:
        if part.index == len(calls):
            calls.append(CalledTool(part.id, part.name))
            arguments.append([])
        arguments[part.index].append(part.arguments)
    for call, texts in zip(calls, arguments, strict=True):
        call.arguments = "".join(texts)
    return calls

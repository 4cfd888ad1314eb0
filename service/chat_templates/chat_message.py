"""A conversation in the form that chat templates get. Imports nothing of gRPC, since renderers use it too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class TemplateToolCall(NamedTuple):
    """A tool call in a message of the assistant."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    """A text, as the model wrote it, if it is not a JSON object."""


class TemplateMessage(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str | None
    tool_calls: Sequence[TemplateToolCall] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """A conversation, with the other variables of its template. ``tools`` and ``variables`` are plain JSON data."""

    messages: Sequence[TemplateMessage]
    add_generation_prompt: bool = True
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] | None = None
    continue_final_message: bool = False
    """Whether the prompt ends where the last message does, within the assistant's turn."""

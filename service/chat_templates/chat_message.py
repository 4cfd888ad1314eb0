"""A conversation as a chat template gets it. Imports nothing of gRPC: what renders templates uses it too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class TemplateToolCall(NamedTuple):
    """A call that an answer of the assistant's made."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    """As the model wrote them, where that is not the JSON text of an object."""


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
    """A conversation, and what else its template is to see. ``tools`` and ``variables`` are plain data of JSON."""

    messages: Sequence[TemplateMessage]
    add_generation_prompt: bool = True
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] | None = None
    continue_final_message: bool = False
    """The prompt ends where the last message does, within the assistant's turn."""

"""The parts of an output that are more than text: log-probabilities, and tool calls, either whole or in parts."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import penstock.v1 as pb

_T = TypeVar("_T")


@dataclass(slots=True)
class Logprobs:
    """Natural logarithms as flat arrays: entry t of ``chosen`` and entries t*num_top to (t+1)*num_top of the ``top``
    arrays belong to the t-th token."""

    chosen: list[float] = field(default_factory=list)
    num_top: int = 0
    top_token_ids: list[int] = field(default_factory=list)
    top: list[float] = field(default_factory=list)
    text_lengths: list[int] = field(default_factory=list)
    """How many characters of the output's text begin in each token; empty for prompts, and if no text was requested."""
    chosen_texts: list[bytes] = field(default_factory=list)
    """The text of each token by itself, which may be part of a character; empty without ``include_token_texts``."""
    top_texts: list[bytes] = field(default_factory=list)
    """The texts of the alternatives; empty without ``include_token_texts``."""

    def extend(self, more: "Logprobs") -> None:
        """Appends the entries of the tokens that follow."""
        self.num_top = more.num_top
        self.chosen += more.chosen
        self.top_token_ids += more.top_token_ids
        self.top += more.top
        self.text_lengths += more.text_lengths
        self.chosen_texts += more.chosen_texts
        self.top_texts += more.top_texts

    def part(self, begin: int, end: int) -> "Logprobs":
        """Returns the entries of the tokens from index ``begin`` to ``end``."""
        tops = slice(begin * self.num_top, end * self.num_top)
        return Logprobs(
            self.chosen[begin:end],
            self.num_top,
            self.top_token_ids[tops],
            self.top[tops],
            self.text_lengths[begin:end],
            self.chosen_texts[begin:end],
            self.top_texts[tops],
        )

    def cut(self, num_top: int) -> "Logprobs":
        """Returns the same entries with at most ``num_top`` alternatives each."""
        if self.num_top <= num_top:
            return self

        def first(values: list[_T]) -> list[_T]:
            begins = range(0, len(values), self.num_top)
            return [value for begin in begins for value in values[begin : begin + num_top]]

        return replace(
            self,
            num_top=num_top,
            top_token_ids=first(self.top_token_ids),
            top=first(self.top),
            top_texts=first(self.top_texts),
        )

    @classmethod
    def from_proto(cls, message: pb.Logprobs) -> "Logprobs":
        return cls(
            list(message.chosen),
            message.num_top,
            list(message.top_token_ids),
            list(message.top),
            list(message.text_lengths),
            list(message.chosen_texts),
            list(message.top_texts),
        )


@dataclass(slots=True)
class CalledTool:
    """A tool call that the model made."""

    id: str
    name: str
    arguments: str = ""
    """The JSON text of an object, unless the call is incomplete."""
    text_offset: int = 0
    """How many characters of the choice's text precede the call."""
    is_incomplete: bool = False
    """Whether the output ended within the arguments, or they are not valid JSON."""


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
            calls.append(CalledTool(part.id, part.name, text_offset=part.text_offset))
            arguments.append([])
        arguments[part.index].append(part.arguments)
        calls[part.index].is_incomplete = part.is_incomplete
    for call, texts in zip(calls, arguments, strict=True):
        call.arguments = "".join(texts)
    return calls

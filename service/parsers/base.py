"""The interface of parsers, and the results of parsing a part of an answer's text."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

Schema = Mapping[str, Any]
"""A JSON schema."""
Spans = tuple[tuple[int, int], ...]
"""The begin and end of each run of characters, in order."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a tool call: only a call's first part has ``id`` and ``name``; ``arguments`` are appended."""

    index: int
    """The index of the call in the answer, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    breaks_off: bool = False
    """Whether the call's arguments end here incomplete: the answer ended, or what followed was not valid JSON."""
    at: int = field(default=0, compare=False)
    """How many characters of its part's content precede it. Depends on how the answer was divided into parts."""


def merge_calls(pieces: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Merges the parts of each call into one: the openai package treats a second entry in a chunk as another call."""
    merged = []
    for _, group in groupby(pieces, lambda piece: piece.index):
        first, *more = group
        if more:
            arguments = "".join([first.arguments, *(piece.arguments for piece in more)])
            first = replace(first, arguments=arguments, breaks_off=more[-1].breaks_off)
        merged.append(first)
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """The output parsed from a part of an answer, to be appended to the earlier output."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    spans: Spans = field(default=(), compare=False)
    """The position of the content in the model's text."""
    reasoning_spans: Spans = field(default=(), compare=False)
    """The same for the reasoning."""
    num_held: int = field(default=0, compare=False)
    """How many characters at the end of the text so far are held back: it is not known yet what they are."""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def __add__(self, more: "ParsedDelta") -> "ParsedDelta":
        """Concatenates two parts."""
        later = (replace(call, at=len(self.content) + call.at) for call in more.calls)
        return ParsedDelta(
            self.content + more.content,
            self.reasoning + more.reasoning,
            merge_calls((*self.calls, *later)),
            self.spans + more.spans,
            self.reasoning_spans + more.reasoning_spans,
            more.num_held,
        )


class AnswerParser(Protocol):
    """Parses one choice. The concatenated output does not depend on how the text is divided into parts."""

    def feed(self, text: str) -> ParsedDelta:
        """Parses more text; holds back a possible beginning of a marker."""

    def end(self) -> ParsedDelta:
        """Ends the answer; returns the text that was held back."""

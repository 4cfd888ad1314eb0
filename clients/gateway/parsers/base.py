"""What a part of an answer's text turned out to be."""

from dataclasses import dataclass, field, replace

Spans = tuple[tuple[int, int], ...]
"""Begin and end of each run of characters, in order."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a tool call: ``id`` and ``name`` are on a call's first piece alone, ``arguments`` are appended."""

    index: int
    """Which call of the answer, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    breaks_off: bool = False
    """Whether the call's arguments end here without being whole: the answer ended, or went on with what is no JSON."""
    at: int = field(default=0, compare=False)
    """How many characters of its part's content come before it. How an answer was cut into parts changes it."""


def append_call(calls: list[ToolCallDelta], piece: ToolCallDelta) -> None:
    """Appends a piece. One that goes on with the last call is put together with it: the openai package takes a second
    entry of one chunk for another call."""
    if calls and calls[-1].index == piece.index:
        last = calls.pop()
        piece = replace(last, arguments=last.arguments + piece.arguments, breaks_off=piece.breaks_off)
    calls.append(piece)


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """What a part of an answer added to it; each is appended to what came before."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    spans: Spans = field(default=(), compare=False)
    """Where the content stands in the text that the model wrote."""

    def __bool__(self) -> bool:
        """Whether it adds anything."""
        return bool(self.content or self.reasoning or self.calls)

    def __add__(self, more: "ParsedDelta") -> "ParsedDelta":
        """Both, one after the other."""
        calls = list(self.calls)
        for call in more.calls:
            append_call(calls, replace(call, at=len(self.content) + call.at))
        return ParsedDelta(
            self.content + more.content, self.reasoning + more.reasoning, tuple(calls), self.spans + more.spans
        )

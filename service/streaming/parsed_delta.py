"""New output of a sequence after it was parsed, its encoded size, and how it is split."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.scheduler.request import SequenceDelta
from penstock.service.config.text_size import utf8_bytes
from penstock.service.parsers.base import ToolCallDelta

_CALL_BYTES = 48
"""An upper bound on the size of a part of a call besides its texts."""


@dataclass(slots=True)
class ParsedSequenceDelta(SequenceDelta):
    """New output of one sequence. ``text`` is only the content, and so are the characters in ``text_lengths``."""

    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    """``at`` is the position in the sequence's whole content. There is one part of each call."""
    ends_with_calls: bool = False
    """Whether the output ended by itself after calls, all of which are complete."""


def parsed_bytes(delta: SequenceDelta) -> int:
    """Returns an upper bound on the encoded size of a delta's reasoning and calls."""
    if not isinstance(delta, ParsedSequenceDelta):
        return 0
    num_bytes = utf8_bytes(delta.reasoning)
    for call in delta.calls:
        num_bytes += _CALL_BYTES + sum(utf8_bytes(text) for text in (call.id, call.name, call.arguments))
    return num_bytes


def reasoning_parts(delta: ParsedSequenceDelta, num_chars: int) -> Iterator[ParsedSequenceDelta]:
    """Yields a delta's reasoning in parts of at most ``num_chars``."""
    for begin in range(0, len(delta.reasoning), num_chars):
        yield ParsedSequenceDelta(delta.choice, [], "", reasoning=delta.reasoning[begin : begin + num_chars])


def call_parts(delta: ParsedSequenceDelta, num_chars: int) -> Iterator[ParsedSequenceDelta]:
    """Yields the parts of a delta's calls, with at most ``num_chars`` of their arguments."""
    for call in delta.calls:
        for begin in range(0, max(len(call.arguments), 1), num_chars):
            end = begin + num_chars
            is_first, is_last = not begin, end >= len(call.arguments)
            part = replace(
                call,
                id=call.id if is_first else "",
                name=call.name if is_first else "",
                arguments=call.arguments[begin:end],
                breaks_off=call.breaks_off and is_last,
            )
            yield ParsedSequenceDelta(delta.choice, [], "", calls=(part,))

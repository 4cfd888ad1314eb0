"""Takes a model's answer apart as it comes: content, reasoning, tool calls.

One parser serves both forms of answer: what is sent whole is the concatenation of what would have been streamed. Knows
neither HTTP nor the service.
"""

from collections.abc import Callable
from typing import Protocol

from penstock.clients.gateway.parsers.base import ParsedDelta, ToolCallDelta
from penstock.clients.gateway.parsers.reasoning import REASONING_FORMATS, ReasoningParser
from penstock.clients.gateway.parsers.tool_formats import TOOL_FORMATS
from penstock.clients.gateway.parsers.tool_parser import ContentParser

__all__ = ["AnswerParser", "ParsedDelta", "ToolCallDelta", "make_parser", "shows_special_tokens"]


class AnswerParser(Protocol):
    """Of one choice. However its text is cut into parts, the pieces' concatenation is the same."""

    def feed(self, text: str) -> ParsedDelta:
        """What new text adds; what may be the beginning of a marker is held back."""
        ...

    def end(self) -> ParsedDelta:
        """What was held back, when the answer is over."""
        ...


def make_parser(
    tool_format: str | None,
    reasoning_format: str | None,
    *,
    tool_names: frozenset[str] = frozenset(),
    in_reasoning: bool = False,
    parallel_calls: bool = True,
    new_call_id: Callable[[], str] | None = None,
) -> AnswerParser:
    """A parser for one choice. None, for either format, leaves such text in the content.

    ``tool_names``: of the request's tools; formats without a marker take nothing else for a call. ``in_reasoning``: the
    prompt ended inside the model's reasoning. Without ``parallel_calls`` an answer's first call is the only one that is
    reported. Raises KeyError for a format that is not one of TOOL_FORMATS or REASONING_FORMATS.
    """
    calls: AnswerParser
    if tool_format is None:
        calls = ContentParser()
    else:
        form = TOOL_FORMATS[tool_format]
        calls = form.parser(tool_names, parallel_calls, new_call_id or form.new_id)
    if reasoning_format is None:
        return calls
    return ReasoningParser(REASONING_FORMATS[reasoning_format], calls, in_reasoning)


def shows_special_tokens(tool_format: str | None, reasoning_format: str | None) -> bool:
    """Whether a format's markers are special tokens, so that the text must be asked for with them."""
    return (tool_format is not None and TOOL_FORMATS[tool_format].has_special_markers) or (
        reasoning_format is not None and REASONING_FORMATS[reasoning_format].has_special_markers
    )

"""Splits a model's answer as it arrives into content, reasoning and tool calls.

One parser serves both forms of answers: a whole answer is the concatenation of a streamed one's parts. Independent of
HTTP and the service.
"""

from collections.abc import Callable

from penstock.clients.gateway.parsers.base import AnswerParser
from penstock.clients.gateway.parsers.reasoning import REASONING_FORMATS, ReasoningParser
from penstock.clients.gateway.parsers.tool_formats import TOOL_FORMATS
from penstock.clients.gateway.parsers.tool_parser import ContentParser, OnlyCallsParser


def make_parser(
    tool_format: str | None,
    reasoning_format: str | None,
    *,
    tool_names: frozenset[str] = frozenset(),
    in_reasoning: bool = False,
    parallel_calls: bool = True,
    only_calls: bool = False,
    new_call_id: Callable[[], str] | None = None,
) -> AnswerParser:
    """Makes a parser for one choice. If a format is None, such text stays in the content.

    ``tool_names``: the names of the request's tools; formats without a marker accept no other calls. ``in_reasoning``:
    the prompt ended inside the model's reasoning. Without ``parallel_calls`` only an answer's first call is reported.
    ``only_calls``: a grammar limits the answer to calls, so it has no content.
    Raises KeyError for a format that is not one of TOOL_FORMATS or REASONING_FORMATS.
    """
    calls: AnswerParser
    if tool_format is None:
        calls = ContentParser()
    else:
        form = TOOL_FORMATS[tool_format]
        calls = form.parser(tool_names, parallel_calls, new_call_id or form.new_id)
        if only_calls:
            calls = OnlyCallsParser(calls)
    if reasoning_format is None:
        return calls
    return ReasoningParser(REASONING_FORMATS[reasoning_format], calls, in_reasoning)


def shows_special_tokens(tool_format: str | None, reasoning_format: str | None) -> bool:
    """Whether a format's markers are special tokens, so that the text must include those."""
    return (tool_format is not None and TOOL_FORMATS[tool_format].has_special_markers) or (
        reasoning_format is not None and REASONING_FORMATS[reasoning_format].has_special_markers
    )

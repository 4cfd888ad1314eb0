"""Splits a model's answer as it arrives into content, reasoning and tool calls.

One parser serves both forms of answers: a whole answer is the concatenation of a streamed one's parts. Independent of
requests and tokens.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from penstock.service.parsers.base import AnswerParser, Schema
from penstock.service.parsers.harmony import HARMONY, HarmonyParser
from penstock.service.parsers.reasoning import REASONING_FORMATS, ReasoningParser
from penstock.service.parsers.tool_formats import TOOL_FORMATS
from penstock.service.parsers.tool_parser import ContentParser, OnlyCallsParser

AUTO, NONE = "auto", "none"
"""Values for a parser: detected from the chat template, and none."""

_NO_TOOLS: Mapping[str, Schema | None] = MappingProxyType({})


def make_parser(
    tool_format: str | None,
    reasoning_format: str | None,
    *,
    tools: Mapping[str, Schema | None] = _NO_TOOLS,
    in_reasoning: bool = False,
    parallel_calls: bool = True,
    only_calls: bool = False,
    new_call_id: Callable[[], str] | None = None,
) -> AnswerParser:
    """Makes a parser for one choice. If a format is None, such text stays in the content.

    ``tools``: the request's tools, each with the schema of its arguments, by which some formats type their values;
    formats without a marker accept no other calls. ``in_reasoning``: the prompt ended inside the model's reasoning.
    Without ``parallel_calls`` only an answer's first call is reported.
    ``only_calls``: a grammar limits the answer to calls, so it has no content.
    Raises KeyError for a format that is not one of TOOL_FORMATS or REASONING_FORMATS.
    """
    calls: AnswerParser
    if HARMONY in (tool_format, reasoning_format):
        new_id = new_call_id or TOOL_FORMATS[HARMONY].new_id
        has = {"has_calls": tool_format is not None, "has_reasoning": reasoning_format is not None}
        calls = HarmonyParser(tools, parallel_calls, new_id, in_reasoning=in_reasoning, **has)
        return OnlyCallsParser(calls) if only_calls else calls
    if tool_format is None:
        calls = ContentParser()
    else:
        form = TOOL_FORMATS[tool_format]
        calls = form.parser(tools, parallel_calls, new_call_id or form.new_id)
        if only_calls:
            calls = OnlyCallsParser(calls)
    if reasoning_format is None:
        return calls
    return ReasoningParser(REASONING_FORMATS[reasoning_format], calls, in_reasoning)


def markers(tool_format: str | None, reasoning_format: str | None) -> frozenset[str]:
    """Returns the formats' markers. Those that are special tokens of the model must be in the text for the parser."""
    found = set[str]()
    if tool_format is not None:
        found.update(TOOL_FORMATS[tool_format].markers)
    if reasoning_format is not None:
        found.update(REASONING_FORMATS[reasoning_format].marks)
    if reasoning_format == HARMONY:  # one parser reads both
        found.update(TOOL_FORMATS[HARMONY].markers)
    return frozenset(found)

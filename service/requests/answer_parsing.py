"""Decides how a request's output is parsed: the formats, where reasoning begins, where a constraint starts, and which
tools may be called."""

from collections.abc import Sequence
from functools import partial

import msgspec

import penstock.v1 as pb
from penstock.scheduler.reasoning_limit import ReasoningLimit
from penstock.service.errors import invalid
from penstock.service.parsers.base import AnswerParser
from penstock.service.parsers.reasoning import REASONING_FORMATS
from penstock.service.parsers.registry import AUTO, NONE, make_parser, markers
from penstock.service.requests.answer_formats import AnswerFormats, OutputFormats
from penstock.service.requests.chat import ToolSchemas, content_text, shows_tools
from penstock.service.requests.tool_choice import forces_call, unknown_format
from penstock.service.text.reasoning import Reasoning, Section
from penstock.service.text.tokenizer import Tokenizer
from penstock.v1 import CONSTRAINT_START_FIRST_TOKEN

_MAX_END_TOKENS = 64
"""The number of tokens at the prompt's end in which the template may have opened reasoning."""
_WITHOUT_TEXT = pb.OUTPUT_FORMAT_TOKEN_IDS


def is_parsed(start: pb.GenerationStart) -> bool:
    """Whether the output of a request is parsed."""
    return start.output.parse_reasoning or start.output.parse_tool_calls


class AnswerParsing:
    """Makes the parsers of one served model's outputs."""

    def __init__(self, tokenizer: Tokenizer, formats: AnswerFormats) -> None:
        self._tokenizer = tokenizer
        self._formats = formats
        self._reasoning = _reasoning(tokenizer, formats.reasoning_parser)
        self._limits: dict[tuple[str, bool], ReasoningLimit] = {}
        """Limits of 0 tokens, by format and by whether calls may follow. Created at first use."""

    def check(self, start: pb.GenerationStart) -> None:
        """Checks a request's options. Raises ServiceError."""
        for name in ("parse_reasoning", "parse_tool_calls"):
            if getattr(start.output, name) and start.output.format == _WITHOUT_TEXT:
                raise invalid(f"output.{name}", "needs text; set output.format to one with text")
        has_budget = start.sampling.HasField("thinking_token_budget")
        if has_budget and self._formats.of(with_tools=shows_tools(start.chat)).reasoning is None:
            raise invalid(
                "sampling.thinking_token_budget",
                "needs a model whose reasoning format is known; omit it, or ask the service's operator to set "
                "--reasoning-parser",
            )
        if not start.output.parse_tool_calls:
            return
        if not start.HasField("chat"):
            raise invalid("output.parse_tool_calls", "needs chat, whose tools the model may call")
        if shows_tools(start.chat) and self._formats.with_tools.tool is None:
            raise unknown_format()

    def parses(self, start: pb.GenerationStart) -> bool:
        """Whether there is anything to parse in a request's output."""
        return is_parsed(start) and self._of(start) != OutputFormats()

    def formats_of(self, start: pb.GenerationStart, grammar: str) -> OutputFormats:
        """Returns the formats on which a request's output depends: those that are parsed, and with a grammar also that
        of the reasoning before it."""
        return self._formats.of(with_tools=shows_tools(start.chat)) if grammar else self._of(start)

    def parses_reasoning(self, start: pb.GenerationStart) -> bool:
        """Whether reasoning is separated from a request's text."""
        return self._of(start).reasoning is not None

    def shown_ids(self, start: pb.GenerationStart) -> frozenset[int]:
        """Returns the special tokens that the text must include for the parser."""
        formats = self._of(start)
        known = self._formats.marker_ids
        shown = [known[marker] for marker in markers(formats.tool, formats.reasoning) if marker in known]
        return self._tokenizer.special_ids.intersection(shown)

    def parsers(
        self, start: pb.GenerationStart, prompt: Sequence[int], schemas: ToolSchemas, *, is_constrained: bool
    ) -> Sequence[AnswerParser]:
        """Returns a parser for each choice of a request; none if its output is not parsed. ``prompt`` are the prompt's
        tokens, and ``schemas`` those of its tools."""
        if not self.parses(start):
            return ()
        formats = self._of(start)
        in_reasoning = self._in_reasoning(start, formats.reasoning, prompt)
        if is_constrained and start.constraint.start == CONSTRAINT_START_FIRST_TOKEN:
            in_reasoning = False
        chat = start.chat
        new_parser = partial(
            make_parser,
            formats.tool,
            formats.reasoning,
            tools=schemas.by_name() if formats.tool is not None else {},
            in_reasoning=in_reasoning,
            parallel_calls=chat.parallel_tool_calls or not chat.HasField("parallel_tool_calls"),
            only_calls=forces_call(chat),
        )
        return [new_parser() for _ in range(start.sampling.n or 1)]

    def after_reasoning(self, grammar: str, start: pb.GenerationStart, prompt: list[int], max_tokens: int) -> str:
        """Returns a grammar for the whole output, in which the constraint's ``grammar`` applies after the reasoning."""
        reasoning = self._reasoning
        if reasoning is None or start.constraint.start == CONSTRAINT_START_FIRST_TOKEN:
            return grammar
        section = self._section(reasoning, start, prompt)
        return reasoning.grammar(grammar, section, max_tokens, shows_marks=self._shows_marks(start))

    def reasoning_limit(
        self, start: pb.GenerationStart, prompt: list[int], *, is_constrained: bool
    ) -> ReasoningLimit | None:
        """Returns the limit on the reasoning of a request's choices; None if there is none, or no reasoning.
        ``is_constrained``: a constraint applies that does not describe the reasoning itself."""
        if not start.sampling.HasField("thinking_token_budget"):
            return None
        with_tools = shows_tools(start.chat)
        name = self._formats.of(with_tools=with_tools).reasoning
        assert name is not None, "checked before"
        form = REASONING_FORMATS[name]
        is_only_answer = start.constraint.start == CONSTRAINT_START_FIRST_TOKEN or (
            form.text_opens and not self._shows_marks(start)
        )
        if is_constrained and is_only_answer:
            return None
        reasoning = self._tokenizer.reasoning.with_format(form)
        section = self._section(reasoning, start, prompt)
        if section is Section.NONE:
            return None
        if (name, with_tools) not in self._limits:
            encode = self._tokenizer.encode_after
            limit = reasoning.limit(self._tokenizer.pieces, encode, calls_may_follow=with_tools)
            self._limits[name, with_tools] = limit
        limit, budget = self._limits[name, with_tools], start.sampling.thinking_token_budget
        return msgspec.structs.replace(limit, max_tokens=budget, is_open=section is Section.OPEN)

    def _section(self, reasoning: Reasoning, start: pb.GenerationStart, prompt: list[int]) -> Section:
        """Returns the section of reasoning that follows a prompt."""
        if not start.HasField("chat"):
            return reasoning.after_text(self._tokenizer.decode(prompt, include_special_tokens=True))
        if start.chat.continue_final_message:
            return reasoning.after_message(content_text(start.chat.messages[-1]))
        return reasoning.after_template(self._tokenizer.decode(prompt[-_MAX_END_TOKENS:], include_special_tokens=True))

    def _shows_marks(self, start: pb.GenerationStart) -> bool:
        return start.output.include_special_tokens or self.parses_reasoning(start)

    def _of(self, start: pb.GenerationStart) -> OutputFormats:
        """Returns the formats that a request has parsed."""
        with_tools, output = shows_tools(start.chat), start.output
        formats = self._formats.of(with_tools=with_tools)
        return OutputFormats(
            formats.tool if output.parse_tool_calls and with_tools else None,
            formats.reasoning if output.parse_reasoning else None,
        )

    def _in_reasoning(self, start: pb.GenerationStart, reasoning: str | None, prompt: Sequence[int]) -> bool:
        """Whether the prompt has opened the reasoning."""
        if reasoning is None:
            return False
        form, chat = REASONING_FORMATS[reasoning], start.chat
        if chat.continue_final_message:
            return form.is_open_in(content_text(chat.messages[-1]))
        if start.HasField("chat") and chat.HasField("add_generation_prompt") and not chat.add_generation_prompt:
            return False
        end = self._tokenizer.decode(list(prompt[-_MAX_END_TOKENS:]), include_special_tokens=True)
        return end.rstrip().endswith(form.opens)


def _reasoning(tokenizer: Tokenizer, parser: str) -> Reasoning | None:
    """Returns where constraints begin, by the operator's choice of a reasoning parser; None: at the first token."""
    if parser == AUTO:
        return tokenizer.reasoning
    return None if parser == NONE else tokenizer.reasoning.with_format(REASONING_FORMATS[parser])

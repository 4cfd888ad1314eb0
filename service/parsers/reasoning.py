"""Separates a model's reasoning from its answer."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from penstock.service.parsers.base import AnswerParser, ParsedDelta
from penstock.service.parsers.harmony import HARMONY
from penstock.service.parsers.incremental_text import HeldSpace, num_held


class ReasoningFormat(NamedTuple):
    """How a model marks its reasoning, at the beginning of an answer."""

    opens: str
    closes: str
    before_answer: str = ""
    """The text between the reasoning and the answer, if that is not white space."""
    text_opens: str = ""
    """The text before the content of an answer, with and without reasoning. A call has other text before it."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The markers, and those inside them, any of which may be a special token of a model."""
        inner = re.findall(r"<\|?[^<>|]+\|?>", self.opens + self.closes + self.before_answer + self.text_opens)
        return tuple(dict.fromkeys((self.opens, self.closes, *inner)))

    def is_open_in(self, text: str) -> bool:
        """Whether a text ends inside reasoning that is still open."""
        return text.rfind(self.opens) > text.rfind(self.closes)


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>"),
    HARMONY: ReasoningFormat(
        "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"
    ),
}
"""The formats by the names for ``--reasoning-parser``."""


class ReasoningParser:
    """Splits off the reasoning; another parser reads the rest. White space next to the markers is dropped."""

    def __init__(self, form: ReasoningFormat, answer: AnswerParser, in_reasoning: bool) -> None:
        """``in_reasoning``: the prompt has the opening marker already."""
        self._form = form
        self._answer = answer
        self._held = ""
        """Text that may be the beginning of a marker."""
        self._held_space = HeldSpace()
        """White space before ``_held``: it is dropped if that becomes a marker."""
        self._may_open = True
        self._in_reasoning = in_reasoning
        self._is_begun = False
        """Whether anything of the reasoning, or else of the answer, has been sent."""
        self._num_read = 0
        self._answer_at: int | None = None
        """The position of the other parser's text in this one's."""
        self._num_held_in_answer = 0
        """How many characters the other parser holds back."""

    def feed(self, text: str) -> ParsedDelta:
        self._num_read += len(text)
        text, self._held = self._held + text, ""
        if self._may_open:
            text = self._open(text)
        if self._may_open:
            return ParsedDelta(num_held=self._num_read)
        return self._reasoning_piece(text) if self._in_reasoning else self._answer_piece(text)

    def end(self) -> ParsedDelta:
        held, self._held = self._held_space.take_text() + self._held, ""
        if self._in_reasoning:
            spans = ((self._num_read - len(held), self._num_read),) if held else ()
            return ParsedDelta(reasoning=held, reasoning_spans=spans)
        self._is_begun = self._is_begun or self._may_open
        return self._answer_piece(held) + self._placed(self._answer.end())

    def _open(self, text: str) -> str:
        """Decides whether an answer begins with reasoning, as soon as that is certain. Returns the text that is not
        held back."""
        begun = text.lstrip()
        if begun.startswith(self._form.opens):
            self._held_space.take_text()
            self._in_reasoning, self._may_open = True, False
            return begun.removeprefix(self._form.opens)
        if self._form.opens.startswith(begun):
            self._held_space.append_text(text[: len(text) - len(begun)])
            self._held = begun
            return ""
        self._may_open = False
        self._is_begun = not self._in_reasoning  # an answer without reasoning keeps its first white space
        return self._held_space.take_text() + text

    def _reasoning_piece(self, text: str) -> ParsedDelta:
        reasoning, marker, answer = text.partition(self._form.closes)
        if not marker:
            end = len(reasoning) - num_held(reasoning, self._form.closes)
            reasoning, self._held = reasoning[:end], reasoning[end:]
        after = self._num_read - len(self._held) - len(marker) - len(answer)
        if not self._is_begun:
            reasoning = reasoning.lstrip()
        visible, num_spaces = self._held_space.append_text(reasoning)
        after -= num_spaces
        spans = ((after - len(visible), after),) if visible else ()
        if marker:
            self._held_space.take_text()
            self._in_reasoning, self._is_begun = False, False
            return replace(self._answer_piece(answer), reasoning=visible, reasoning_spans=spans)
        self._is_begun = self._is_begun or bool(visible)
        return ParsedDelta(reasoning=visible, reasoning_spans=spans, num_held=self._num_read - after)

    def _answer_piece(self, text: str) -> ParsedDelta:
        if not self._is_begun:
            text = text.lstrip()
        if not text:
            return ParsedDelta(num_held=self._num_held_in_answer)
        self._is_begun = True
        if self._answer_at is None:
            self._answer_at = self._num_read - len(text)
        piece = self._answer.feed(text)
        self._num_held_in_answer = piece.num_held
        return self._placed(piece)

    def _placed(self, piece: ParsedDelta) -> ParsedDelta:
        """Returns the other parser's output with the positions of this one's text."""
        at = self._answer_at or 0
        spans = tuple((begin + at, end + at) for begin, end in piece.spans)
        return replace(piece, spans=spans)

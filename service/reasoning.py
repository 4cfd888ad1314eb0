"""Where a constraint begins: reasoning comes first and is free, then the answer matches. Knows texts, token ids and
grammars as text; the library that compiles them is for other processes."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

MAX_RESERVED_TOKENS = 1024
"""Kept for the answer, or a quarter of ``max_tokens`` if that is less: reasoning that fills the rest is closed."""


class Marks(NamedTuple):
    """How a model marks its reasoning."""

    opens: str
    closes: str


MARKS = (Marks("<think>", "</think>"), Marks("[THINK]", "[/THINK]"))


class Section(Enum):
    """What an output begins with."""

    NONE = auto()
    """The answer."""
    OPEN = auto()
    """Reasoning that the prompt has opened."""
    POSSIBLE = auto()
    """Reasoning, if the model opens it, or the answer."""


class Reasoning:
    """A model's reasoning, as far as its templates and its tokens show it."""

    def __init__(
        self,
        templates: Sequence[str],
        token_ids: Mapping[str, int],
        special_tokens: Collection[str],
        eos_token_ids: Sequence[int],
    ) -> None:
        """``token_ids``: those of marks that are single tokens of the model."""
        shown = next((marks for marks in MARKS if any(marks.opens in template for template in templates)), None)
        self._opens_itself = shown is not None
        self._marks = shown or next((marks for marks in MARKS if marks.closes in token_ids), MARKS[0])
        self._ids = token_ids
        self._turns = [token for token in special_tokens if token not in self._marks]
        self._eos_token_ids = eos_token_ids

    def after_template(self, end: str) -> Section:
        """For the end of what a template renders."""
        end = end.rstrip()
        if end.endswith(self._marks.opens):
            return Section.OPEN
        return Section.NONE if end.endswith(self._marks.closes) else self._unopened

    def after_message(self, content: str) -> Section:
        """For an answer that is continued."""
        begins = self._last(content)
        return Section.NONE if begins < 0 or self._marks.closes in content[begins:] else Section.OPEN

    def after_text(self, text: str) -> Section:
        """For a prompt of which nobody says whose turns its parts are: a special token ends a turn."""
        begins = self._last(text)
        rest = text[begins:] if begins >= 0 else ""
        if rest and self._marks.closes not in rest and not any(token in rest for token in self._turns):
            return Section.OPEN
        return Section.NONE if text.rstrip().endswith(self._marks.closes) else self._unopened

    def grammar(self, answer: str, section: Section, max_tokens: int) -> str:
        """The grammar of the whole output, of at most ``max_tokens``."""
        if section is Section.NONE:
            return answer
        opens, closes = self._marks
        rules = [r"space: /[ \n]{0,2}/"]
        if closes in self._ids:
            most = max(0, max_tokens - min(max_tokens // 4, MAX_RESERVED_TOKENS) - 1)
            ids = ",".join(map(str, sorted({self._ids[closes], *self._eos_token_ids})))
            free = f"(<[^{ids}]>){{0,{most}}} " if most else ""
            rules.append(f"thought: {free}<[{self._ids[closes]}]>")
        else:
            rules.append(f"thought[lazy]: /(?s:.*){_escaped(closes)}/")
        before = "thought space"
        if section is Section.POSSIBLE:
            before = "(opening thought space)?"
            opening = f"space <[{self._ids[opens]}]>" if opens in self._ids else rf"/[ \n]{{0,2}}{_escaped(opens)}/"
            rules.append(f"opening: {opening}")
        # What the library is told of one grammar it has to be told of the other.
        options = answer.partition("\n")[0] + "\n" if answer.startswith("%llguidance") else ""
        whole = options + "\n".join([f"start: {before} @answer", *rules])
        return json.dumps({"grammars": [{"lark_grammar": whole}, {"name": "answer", "lark_grammar": answer}]})

    @property
    def _unopened(self) -> Section:
        return Section.POSSIBLE if self._opens_itself else Section.NONE

    def _last(self, text: str) -> int:
        return text.rfind(self._marks.opens)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")

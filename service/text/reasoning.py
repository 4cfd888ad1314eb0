"""Decides where a constraint begins: reasoning comes first and is unconstrained, then the constraint applies. Works on
texts, token ids and the source of grammars; another process compiles them."""

import json
from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto

from penstock.service.parsers.lark_grammar import escaped, marker_expression
from penstock.service.parsers.reasoning import REASONING_FORMATS, ReasoningFormat

REASONING_MARKS = tuple(mark for form in REASONING_FORMATS.values() for mark in form.marks)
MAX_RESERVED_TOKENS = 1024
"""Tokens reserved for the answer, or a quarter of ``max_tokens`` if that is fewer. Reasoning that uses up the rest is
closed."""


class Section(Enum):
    """The reasoning section at the start of an output."""

    NONE = auto()
    """There is none: the output begins with the answer."""
    OPEN = auto()
    """The prompt has opened it."""
    POSSIBLE = auto()
    """The model may open it, or begin with the answer."""


class Reasoning:
    """Finds sections of reasoning in prompts, by the marks in the model's templates and vocabulary."""

    def __init__(
        self,
        templates: Sequence[str],
        token_ids: Mapping[str, int],
        special_tokens: Collection[str],
        eos_token_ids: Sequence[int],
        form: ReasoningFormat | None = None,
    ) -> None:
        """``token_ids``: the ids of the marks that are single tokens of the model. ``form``: the format of the
        reasoning; by default that of the templates."""
        formats = tuple(REASONING_FORMATS.values())
        shown = form or next((form for form in formats if any(form.opens in template for template in templates)), None)
        self._unopened = Section.NONE if shown is None else Section.POSSIBLE
        form = shown or next((form for form in formats if form.closes in token_ids and not form.text_opens), formats[0])
        self._form = form
        self._opens, self._closes = form.opens, form.closes
        self._ids = token_ids
        self._special_tokens = special_tokens
        self._turns = [token for token in special_tokens if token not in (form.opens, form.closes)]
        self._eos_token_ids = eos_token_ids

    def with_format(self, form: ReasoningFormat) -> "Reasoning":
        """Returns the same for a model that is known to write its reasoning in this format."""
        return Reasoning((), self._ids, self._special_tokens, self._eos_token_ids, form)

    def after_template(self, end: str) -> Section:
        """Returns the section that follows a rendered template; ``end`` is its last part."""
        end = end.rstrip()
        if end.endswith(self._opens):
            return Section.OPEN
        return Section.NONE if end.endswith(self._closes) else self._unopened

    def after_message(self, content: str) -> Section:
        """Returns the section that an assistant's message leaves when the model continues it."""
        begins = content.rfind(self._opens)
        return Section.NONE if begins < 0 or self._closes in content[begins:] else Section.OPEN

    def after_text(self, text: str) -> Section:
        """Returns the section that follows a prompt without messages. A special token ends a turn there."""
        if not text.rstrip().endswith(self._form.before_answer):
            return Section.NONE
        begins = text.rfind(self._opens)
        rest = text[begins:] if begins >= 0 else ""
        if rest and self._closes not in rest and not any(token in rest for token in self._turns):
            return Section.OPEN
        return Section.NONE if text.rstrip().endswith(self._closes) else self._unopened

    def grammar(self, answer: str, section: Section, max_tokens: int, *, shows_marks: bool = True) -> str:
        """Returns the grammar of the whole output, which has at most ``max_tokens``: reasoning, then ``answer``.
        ``shows_marks``: the output's text has special tokens. Without them the parts of an answer in channels could not
        be told apart, so it is only ``answer``."""
        if section is Section.NONE or (self._form.text_opens and not shows_marks):
            return answer
        opens, closes = self._opens, self._closes
        between = self._form.before_answer
        rules = [f"space: {self._expression(between)}" if between else r"space: /[ \n]{0,2}/"]
        if closes in self._ids:
            most = max(0, max_tokens - min(max_tokens // 4, MAX_RESERVED_TOKENS) - 1)
            ids = ",".join(map(str, sorted({self._ids[closes], *self._eos_token_ids})))
            free = f"(<[^{ids}]>){{0,{most}}} " if most else ""
            rules.append(f"thought: {free}<[{self._ids[closes]}]>")
        else:
            rules.append(f"thought[lazy]: /(?s:.*){escaped(closes)}/")
        before = "thought space"
        if section is Section.POSSIBLE:
            before = "(opening thought space)?"
            if opens in self._ids:
                opening = f"space <[{self._ids[opens]}]>"
            elif any(mark in opens for mark in self._ids):
                opening = self._expression(opens)
            else:
                opening = rf"/[ \n]{{0,2}}{escaped(opens)}/"
            rules.append(f"opening: {opening}")
        if self._form.text_opens:
            before += f" {self._expression(self._form.text_opens)}"
        # The library requires the same options on both grammars.
        options = answer.partition("\n")[0] + "\n" if answer.startswith("%llguidance") else ""
        whole = options + "\n".join([f"start: {before} @answer", *rules])
        return json.dumps({"grammars": [{"lark_grammar": whole}, {"name": "answer", "lark_grammar": answer}]})

    def _expression(self, text: str) -> str:
        return marker_expression(text, {mark: self._ids[mark] for mark in self._form.marks if mark in self._ids})

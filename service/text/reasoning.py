"""Decides where a constraint begins: reasoning comes first and is unconstrained, then the constraint applies. Describes
how reasoning with a limit is closed. Works on texts, token ids and the source of grammars; another process compiles
them."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum, auto

from penstock.scheduler.reasoning_limit import MarkerSearch, ReasoningLimit
from penstock.service.parsers.lark_grammar import escaped, marker_expression
from penstock.service.parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from penstock.service.text.token_table import TokenTextTable

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

    def limit(
        self, table: TokenTextTable, encode: Callable[[str], list[int]], *, calls_may_follow: bool
    ) -> ReasoningLimit:
        """Returns a limit of 0 tokens for reasoning that the prompt has opened. ``encode`` returns the tokens of a text
        that follows other text. With ``calls_may_follow``, the model chooses between an answer and a call. Slow for a
        large vocabulary."""
        form = self._form
        more = "" if calls_may_follow else form.before_answer + form.text_opens
        closing = [self._spelled(form.closes + more, encode)]
        if form.closes not in self._ids:  # the text may already end with the beginning of the marker
            closing += [self._spelled(form.closes[at:] + more, encode) for at in range(1, len(form.closes))]
        opens = _search(form.opens, table, at_beginning=not form.text_opens)
        return ReasoningLimit(0, True, _search(form.closes, table), tuple(closing), opens)

    def _spelled(self, text: str, encode: Callable[[str], list[int]]) -> tuple[int, ...]:
        """Returns the tokens of a text in which each mark that is a token becomes that token."""
        marks = "|".join(re.escape(mark) for mark in sorted(self._ids, key=len, reverse=True))
        parts = [part for part in re.split(f"({marks})", text) if part] if marks else [text]
        return tuple(
            token_id for part in parts for token_id in ([self._ids[part]] if part in self._ids else encode(part))
        )

    def _expression(self, text: str) -> str:
        return marker_expression(text, {mark: self._ids[mark] for mark in self._form.marks if mark in self._ids})


def _search(marker: str, table: TokenTextTable, *, at_beginning: bool = False) -> MarkerSearch:
    """Returns how a marker is found in the text of tokens. ``at_beginning``: see ``MarkerSearch``."""
    wanted = marker.encode()
    next_state = _first_state if at_beginning else _text_state
    moves: list[dict[int, int]] = [{} for _ in wanted]
    by_byte: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)
    for token_id, text in _texts(table):
        by_byte[text[0]].append((token_id, text))
        if at_beginning or wanted[0] in text:
            found = next_state(wanted, 0, text)
            if found > 0 or (at_beginning and found == 0):
                moves[0][token_id] = found
    for state in range(1, len(wanted)):
        # The text continues the marker, or one that began later.
        begins = {wanted[state], *(wanted[at] for at in range(1, state) if wanted[:at] == wanted[state - at : state])}
        for token_id, text in (each for byte in begins for each in by_byte[byte]):
            found = next_state(wanted, state, text)
            if found >= 0 and (at_beginning or found != moves[0].get(token_id, 0)):
                moves[state][token_id] = found
    return MarkerSearch(len(wanted), tuple(moves), at_beginning)


def _texts(table: TokenTextTable) -> Iterator[tuple[int, bytes]]:
    for token_id, text in enumerate(table.all):
        content = table.split.get(token_id, b"") if text is None else text.encode()
        if content:
            yield token_id, content


def _text_state(marker: bytes, state: int, text: bytes) -> int:
    """Returns the length of the longest prefix of the marker at the end of a text that began with ``state`` of its
    bytes; the marker's length if the text contains it."""
    whole = marker[:state] + text
    if marker in whole:
        return len(marker)
    return next(size for size in range(min(len(marker) - 1, len(whole)), -1, -1) if whole.endswith(marker[:size]))


def _first_state(marker: bytes, state: int, text: bytes) -> int:
    """Does the same for a marker at the beginning, after white space; -1 if it is not there."""
    whole = marker[:state] + text if state else text.lstrip()
    if whole.startswith(marker):
        return len(marker)
    return len(whole) if marker.startswith(whole) else -1

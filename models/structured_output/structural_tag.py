"""Converts structural tags, as in vLLM, SGLang and xgrammar, to Lark grammars: texts with tagged parts, each of which
matches a format of its own. Formats that cannot be enforced are refused by name."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from penstock.models.structured_output.exact_numbers import quoted
from penstock.models.structured_output.tag_formats import TagError, TagFormat, read_tag, up_to
from penstock.models.structured_output.tag_tokens import End, Piece, TagTokens

_TEXT = "/(?s:.*)/"
_CONTAINERS = frozenset({"sequence", "or", "tag", "optional", "star", "plus", "repeat"})


class PartWriters(NamedTuple):
    """Converts the parts that are constraints themselves."""

    schema: Callable[[Any, int], tuple[str, list[str]]]
    """Returns an expression for a schema, and the rules that it needs. Their names contain the number."""
    grammar: Callable[[str], str]
    """Converts a grammar to Lark."""
    regex: Callable[[str], str]
    """Converts a regular expression to a terminal."""


def tag_grammar(tag: Any, tokens: TagTokens, parts: PartWriters) -> str:
    """Returns the Lark grammar of a parsed structural tag. Raises TagError."""
    writer = _TagWriter(tokens, parts)
    return "\n".join([f"start: {writer.expression(read_tag(tag))}", *writer.rules])


class _TagWriter:
    """A grammar under construction.

    A format is open if it may end in arbitrary text. Its expression then includes its ``ends``, the strings and tokens
    that may follow it, because the text ends where one of them first appears.
    """

    def __init__(self, tokens: TagTokens, parts: PartWriters) -> None:
        self.rules: list[str] = []
        self._tokens = tokens
        self._parts = parts
        self._known_terminals: dict[int, str | None] = {}
        """The results of ``_terminal`` by the identity of the format."""

    def expression(self, form: TagFormat, ends: Sequence[End] = ()) -> str:
        """Returns the expression of a format, followed by one of the ``ends``, if there are any."""
        if not form.is_open and ends:
            return f"{self.expression(form)} {self._tokens.any_of(ends)}"
        if not ends and (terminal := self._terminal(form)) is not None:
            return terminal if form.type in _CONTAINERS else self._named_terminal(terminal)
        write: Callable[[TagFormat, Sequence[End]], str] = getattr(self, f"_write_{form.type}")
        return write(form, ends)

    # Rules and tokens -------------------------------------------------------------------------------------------------

    def _rule(self, body: str, options: str = "") -> str:
        name = f"tag_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _named_terminal(self, terminal: str) -> str:
        name = f"TAG_{len(self.rules)}"
        self.rules.append(f"{name}: {terminal}")
        return name

    # Text -------------------------------------------------------------------------------------------------------------

    def _text(self, form: TagFormat) -> str:
        """Returns the terminal of a format's free text."""
        most = form.fields.get("max_chars")
        text = _TEXT if most is None else f"/(?s:.{{0,{most}}})/"
        excluded = [each for each in form.fields["excludes"] if not self._tokens.has_special(each)]
        return f"({text} & ~(/(?s:.*)/ {_one_of(excluded)} /(?s:.*)/))" if excluded else text

    def _text_to(self, end: End, text: str, longer: Sequence[str] = ()) -> str:
        """Returns the expression of a text that matches the terminal ``text``, up to and including the first ``end``.
        It must not end with any of ``longer``."""
        first, *rest = self._tokens.pieces(end)
        if not first.is_terminal:
            return " ".join([self._named_terminal(text), first.text, *(piece.text for piece in rest)])
        terminal = f"{text} {first.text}"
        if longer:
            terminal = f"({terminal}) & ~(/(?s:.*)/ {_one_of(longer)})"
        if rest:  # a special token, which occurs nowhere else in the text
            return " ".join([self._named_terminal(terminal), *(piece.text for piece in rest)])
        return self._rule(self._named_terminal(terminal), "[lazy]")

    def _text_to_any(self, ends: Sequence[End], text: str) -> str:
        return f"({' | '.join(self._text_to(end, text) for end in ends)})" if ends else self._named_terminal(text)

    # Regular formats --------------------------------------------------------------------------------------------------

    def _terminal(self, form: TagFormat) -> str | None:
        """Returns the terminal of a regular format; None for all others. If it is open, nothing may follow it."""
        if id(form) not in self._known_terminals:
            terminal = self._new_terminal(form)
            if terminal is not None and form.type in _CONTAINERS:  # named: the library limits brackets, not names
                terminal = self._named_terminal(terminal)
            self._known_terminals[id(form)] = terminal
        return self._known_terminals[id(form)]

    def _new_terminal(self, form: TagFormat) -> str | None:
        fields = form.fields
        match form.type:
            case "const_string":
                return None if self._tokens.has_special(fields["value"]) else quoted(fields["value"])
            case "regex":
                return self._parts.regex(fields["pattern"])
            case "any_text":
                return self._text(form)
            case "sequence":
                is_regular = not any(each.is_open for each in fields["elements"][:-1])
                return self._terminals(fields["elements"], " ") if is_regular else None
            case "or":
                return self._terminals(fields["elements"], " | ")
            case "tag":
                if fields["content"].is_open or self._terminal(fields["content"]) is None:
                    return None
                pieces = self._tag_pieces(form)
                return " ".join(piece.text for piece in pieces) if all(piece.is_terminal for piece in pieces) else None
            case "optional" | "star" | "plus" | "repeat":
                content = self._terminal(fields["content"])
                return None if content is None else form.repeated(f"({content})")
        return None

    def _terminals(self, elements: Sequence[TagFormat], separator: str) -> str | None:
        found = [self._terminal(each) for each in elements]
        known = [each for each in found if each is not None]
        return separator.join(known) if len(known) == len(found) else None

    # Sequences --------------------------------------------------------------------------------------------------------

    def _joined(self, pieces: Sequence[Piece]) -> str:
        runs = []
        for is_terminal, run in groupby(pieces, lambda piece: piece.is_terminal):
            text = " ".join(piece.text for piece in run)
            runs.append(self._named_terminal(text) if is_terminal else text)
        return " ".join(runs) or '""'

    def _pieces(self, form: TagFormat) -> list[Piece]:
        """Returns the pieces of a format that no text precedes, and that is not open."""
        if (terminal := self._terminal(form)) is not None:
            return [Piece(terminal, True)]
        if form.type == "const_string":
            return self._tokens.pieces(form.fields["value"])
        return self._tag_pieces(form) if form.type == "tag" else [Piece(self.expression(form), False)]

    def _tag_pieces(self, form: TagFormat, num_begun: int = 0) -> list[Piece]:
        """Returns the pieces of a tag without the first characters of its beginning. If it begins with a token, any
        number drops the whole token."""
        begin, content = self._tokens.border(form.fields["begin"]), form.fields["content"]
        ends = [self._tokens.border(end) for end in form.fields["end"]]
        pieces = [] if isinstance(begin, int) and num_begun else self._tokens.pieces(begin)
        if isinstance(begin, str):
            pieces = self._tokens.pieces(begin[num_begun:])
        if content.is_open:
            return [*pieces, Piece(self.expression(content, ends), False)]
        end_pieces = [self._tokens.pieces(end) for end in ends]
        is_terminal = all(piece.is_terminal for some in end_pieces for piece in some)
        return [*pieces, *self._pieces(content), Piece(self._tokens.any_of(ends), is_terminal)]

    def _write_sequence(self, form: TagFormat, ends: Sequence[End]) -> str:
        *elements, last = form.fields["elements"]
        pieces: list[Piece] = []
        begun = 0
        for element, following in zip(elements, [*elements[1:], last], strict=True):
            if element.is_open:
                end = self._visible_beginning(following)
                pieces.append(Piece(self.expression(element, [end]), False))
                begun = 1 if isinstance(end, int) else len(end)
            else:
                pieces += self._rest(element, begun)
                begun = 0
        pieces += [Piece(self.expression(last, ends), False)] if last.is_open else self._rest(last, begun)
        return self._joined(pieces)

    def _rest(self, form: TagFormat, num_begun: int) -> list[Piece]:
        """Returns the pieces of a format whose first characters, this many, belong to the text before it."""
        if not num_begun:
            return self._pieces(form)
        return self._tag_pieces(form, num_begun) if form.type == "tag" else []

    def _visible_beginning(self, form: TagFormat) -> End:
        """Returns the string or token by which the start of a format is found in a text."""
        begin: End = ""
        if form.type == "tag":
            begin = self._tokens.border(form.fields["begin"])
        elif form.type == "const_string":
            begin = form.fields["value"]
        if begin == "":
            raise TagError(form.place, "follows any text, so it must be a tag with a beginning, or a const_string")
        return begin

    # Texts with tags --------------------------------------------------------------------------------------------------

    def _dispatched(self, form: TagFormat, bodies: Mapping[End, str], ends: Sequence[End]) -> str:
        """Returns the expression of a text in which each trigger is followed by its body."""
        text = self._text(form)
        tagged, last = [], [self._text_to_any(ends, text)]
        for trigger, body in bodies.items():
            others = [other for other in bodies if isinstance(other, str) and other != trigger]
            longer = [other for other in others if isinstance(trigger, str) and other.endswith(trigger)]
            head = self._rule(self._text_to(trigger, text, longer))
            tagged.append(f"{head} {body}")
            if isinstance(trigger, str):  # an end may begin with a trigger
                after = [end[len(trigger) :] for end in ends if isinstance(end, str) and end.startswith(trigger)]
                last += [f"{head} {self._tokens.marker(rest)}" for rest in after if rest]
        return self._looped(form, bodies, tagged, last, ends)

    def _dispatched_tokens(self, form: TagFormat, bodies: Mapping[End, str], ends: Sequence[End]) -> str:
        """Does the same for triggers that are tokens."""
        excluded = self._tokens.token_ids(form.fields["exclude_tokens"], f"{form.place}.exclude_tokens")
        free = self._free_tokens(form, [*excluded, *(each for each in bodies if isinstance(each, int))], ends)
        tagged = [f"{free} {self._tokens.marker(trigger)} {body}" for trigger, body in bodies.items()]
        return self._looped(form, bodies, tagged, [f"{free} {self._tokens.any_of(ends) if ends else ''}"], ends)

    def _looped(
        self,
        form: TagFormat,
        bodies: Mapping[End, str],
        tagged: Sequence[str],
        last: Sequence[str],
        ends: Sequence[End],
    ) -> str:
        """Returns the expression of texts with tags, ``tagged``, and a last one without a tag."""
        one, tail = self._rule(" | ".join(tagged)), self._rule(" | ".join(last))
        end = f" {self._tokens.any_of(ends)}" if ends else ""
        ends_after_one = form.fields.get("stop_after_first", not form.fields.get("loop", True))
        if not form.fields.get("at_least_one"):
            return self._rule(f"{one}{end} | {tail}") if ends_after_one else f"{one}* {tail}"
        first = self._rule(" | ".join(f"{self._tokens.marker(trigger)} {body}" for trigger, body in bodies.items()))
        return f"{first}{end}" if ends_after_one else f"{first} {one}* {tail}"

    def _write_triggered_tags(self, form: TagFormat, ends: Sequence[End]) -> str:
        triggers: list[str] = form.fields["triggers"]
        bodies: dict[End, list[str]] = {}
        used = set()
        for tag in form.fields["tags"]:
            begin = tag.fields["begin"]
            found = [each for each in triggers if isinstance(begin, str) and begin.startswith(each)]
            if len(found) != 1:
                raise TagError(f"{tag.place}.begin", "must begin with exactly one of the triggers")
            used.add(found[0])
            trigger = self._tokens.whole_part(begin, len(found[0]))
            bodies.setdefault(trigger, []).append(self._joined(self._tag_pieces(tag, len(trigger))))
        for index, trigger in enumerate(triggers):
            if trigger not in used:
                place = f"{form.place}.triggers" if form.place else "triggers"
                raise TagError(f"{place}[{index}]", "is not the beginning of any tag")
        return self._dispatched(form, {trigger: self._rule(" | ".join(each)) for trigger, each in bodies.items()}, ends)

    def _write_dispatch(self, form: TagFormat, ends: Sequence[End]) -> str:
        bodies: dict[End, str] = {}
        for index, (pattern, content) in enumerate(form.fields["rules"]):
            place = f"{form.place}.rules[{index}]"
            if not isinstance(pattern, str):
                raise TagError(place, "the pattern must be a string")
            if any(pattern.startswith(str(other)) or str(other).startswith(pattern) for other in bodies):
                raise TagError(place, "no pattern may begin with another")
            bodies[pattern] = self._rule(self.expression(content))
        return self._dispatched(form, bodies, ends)

    def _write_token_triggered_tags(self, form: TagFormat, ends: Sequence[End]) -> str:
        triggers = self._tokens.token_ids(form.fields["trigger_tokens"], f"{form.place}.trigger_tokens")
        bodies: dict[End, list[str]] = {}
        for tag in form.fields["tags"]:
            begin = self._tokens.border(tag.fields["begin"])
            if begin not in triggers:
                raise TagError(f"{tag.place}.begin", "must be one of the tokens in trigger_tokens")
            bodies.setdefault(begin, []).append(self._joined(self._tag_pieces(tag, 1)))
        for index, trigger in enumerate(triggers):
            if trigger not in bodies:
                raise TagError(f"{form.place}.trigger_tokens[{index}]", "is not the beginning of any tag")
        rules = {trigger: self._rule(" | ".join(each)) for trigger, each in bodies.items()}
        return self._dispatched_tokens(form, rules, ends)

    def _write_token_dispatch(self, form: TagFormat, ends: Sequence[End]) -> str:
        bodies: dict[End, str] = {}
        for index, (pattern, content) in enumerate(form.fields["rules"]):
            place = f"{form.place}.rules[{index}]"
            token_id = self._tokens.token_id(pattern, place)
            if token_id in bodies:
                raise TagError(place, "is the second rule for this token")
            bodies[token_id] = self._rule(self.expression(content))
        return self._dispatched_tokens(form, bodies, ends)

    def _write_tags_with_separator(self, form: TagFormat, ends: Sequence[End]) -> str:
        fields = form.fields
        tag = self._rule(" | ".join(self._joined(self._tag_pieces(each)) for each in fields["tags"]))
        more = "" if fields["stop_after_first"] else f" ({self._tokens.marker(fields['separator'])} {tag})*"
        return f"({tag}{more})" + ("" if fields["at_least_one"] else "?")

    # Other formats ----------------------------------------------------------------------------------------------------

    def _write_tag(self, form: TagFormat, ends: Sequence[End]) -> str:
        return self._joined(self._tag_pieces(form))

    def _write_const_string(self, form: TagFormat, ends: Sequence[End]) -> str:
        return self._tokens.marker(form.fields["value"])

    def _write_any_text(self, form: TagFormat, ends: Sequence[End]) -> str:
        return self._text_to_any(ends, self._text(form))

    def _write_json_schema(self, form: TagFormat, ends: Sequence[End]) -> str:
        schema, most = form.fields["json_schema"], form.fields["max_whitespace_cnt"]
        if most is not None and isinstance(schema, dict):
            schema = {**schema, "x-guidance": {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{0,{most}}}"}}
        try:
            body, rules = self._parts.schema(schema, len(self.rules))
        except TagError as error:
            raise TagError(form.place, str(error)) from None
        self.rules += rules
        return self._rule(body)

    def _write_grammar(self, form: TagFormat, ends: Sequence[End]) -> str:
        try:
            grammar = self._parts.grammar(form.fields["grammar"])
        except TagError as error:
            raise TagError(form.place, str(error)) from None
        return self._rule(f"%lark {{\n{grammar}\n}}")

    def _write_or(self, form: TagFormat, ends: Sequence[End]) -> str:
        return self._rule(" | ".join(self.expression(each, ends) for each in form.fields["elements"]))

    def _write_optional(self, form: TagFormat, ends: Sequence[End]) -> str:
        content = self.expression(form.fields["content"], ends)
        return self._rule(f"{content} | {self._tokens.any_of(ends) if ends else ''}")

    def _repeated(self, form: TagFormat, ends: Sequence[End]) -> str:
        return form.repeated(self._rule(self.expression(form.fields["content"])))

    _write_star = _write_plus = _write_repeat = _repeated

    def _write_token(self, form: TagFormat, ends: Sequence[End]) -> str:
        return self._tokens.marker(self._tokens.border(form))

    def _write_exclude_token(self, form: TagFormat, ends: Sequence[End]) -> str:
        excluded = self._tokens.token_ids(form.fields["exclude_tokens"], f"{form.place}.exclude_tokens")
        return self._tokens.token_besides(excluded)

    def _write_any_tokens(self, form: TagFormat, ends: Sequence[End]) -> str:
        excluded = self._tokens.token_ids(form.fields["exclude_tokens"], f"{form.place}.exclude_tokens")
        free = self._free_tokens(form, excluded, ends)
        return f"{free} {self._tokens.any_of(ends)}" if ends else free

    def _free_tokens(self, form: TagFormat, excluded: Sequence[int], ends: Sequence[End]) -> str:
        """Returns the expression of any tokens except the excluded ones and those that end it."""
        if not all(isinstance(end, int) for end in ends):
            raise TagError(form.place, "what follows any tokens must be a token, as an object of type token")
        most = form.fields.get("max_tokens")
        stops = [*excluded, *(end for end in ends if isinstance(end, int))]
        return up_to(self._tokens.token_besides(stops), most)


def _one_of(texts: Sequence[str]) -> str:
    return f"({' | '.join(map(quoted, texts))})"

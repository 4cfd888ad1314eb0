"""The strings and tokens that mark the parts of a structural tag, as Lark expressions."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.models.structured_output.exact_numbers import quoted
from penstock.models.structured_output.tag_formats import TagError, TagFormat

End = str | int
"""The end of a text: a string, or the id of a token."""


class Piece(NamedTuple):
    """A part of a sequence. Adjacent terminals become one, so that the lexer, which is greedy, need not find the
    boundary between them."""

    text: str
    is_terminal: bool


class TagTokens:
    """The tokens that tags may name, by their contents. A special token is not text: if a tag's string spells one, it
    becomes that token."""

    def __init__(
        self, special_ids: Mapping[str, int], added_ids: Mapping[str, int], eos_ids: Sequence[int] = ()
    ) -> None:
        """``added_ids`` are the only ids that a format for tokens may name. ``eos_ids`` end an output, so no format
        contains them."""
        self._special_ids = special_ids
        self._added_ids = added_ids
        self._eos_ids = eos_ids
        specials = "|".join(re.escape(token) for token in sorted(special_ids, key=len, reverse=True))
        self._specials = re.compile(f"({specials})" if specials else "((?!))")

    def has_special(self, text: str) -> bool:
        return self._specials.search(text) is not None

    def whole_part(self, text: str, length: int) -> str:
        """Returns the first ``length`` characters of a text, or a few more if they would end within a special token."""
        spans = (found.span() for found in self._specials.finditer(text))
        return text[: next((end for start, end in spans if start < length < end), length)]

    def pieces(self, end: End) -> list[Piece]:
        """Returns the pieces of a string or a token."""
        if isinstance(end, int):
            return [Piece(f"<[{end}]>", False)]
        ids = self._special_ids
        parts = [part for part in self._specials.split(end) if part]
        return [Piece(f"<[{ids[part]}]>", False) if part in ids else Piece(quoted(part), True) for part in parts]

    def marker(self, end: End) -> str:
        return " ".join(piece.text for piece in self.pieces(end)) or '""'

    def any_of(self, ends: Sequence[End]) -> str:
        return f"({' | '.join(map(self.marker, ends))})"

    def token_besides(self, token_ids: Sequence[int]) -> str:
        """Returns the expression of any token except these and those that end an output."""
        return f"<[^{','.join(map(str, sorted({*token_ids, *self._eos_ids})))}]>"

    def border(self, value: str | TagFormat) -> End:
        """Returns the beginning or an end of a tag. Raises TagError."""
        return value if isinstance(value, str) else self.token_id(value.fields["token"], f"{value.place}.token")

    def token_ids(self, given: Sequence[int | str], place: str) -> list[int]:
        """Returns the ids of tokens that are given by name or by id. Raises TagError."""
        return [self.token_id(each, f"{place}[{index}]") for index, each in enumerate(given)]

    def token_id(self, given: int | str, place: str) -> int:
        """Returns the id of one token. Raises TagError."""
        if isinstance(given, int):
            return given
        if given not in self._added_ids:
            raise TagError(place, "is not the name of a token that was added to the vocabulary; use the id")
        return self._added_ids[given]

"""Finds the tokens of an answer's content, without those of reasoning, calls and their markers.

The service reports how many characters of the content begin in each token.
"""

from collections.abc import Iterable

from penstock.clients.gateway.json_object import Json
from penstock.clients.output import Logprobs

PlacedEntry = tuple[int, Json]
"""The log-probabilities of a token, and its position in the content of its part, in characters."""


class ContentTokens:
    """Tracks the position in the content of one choice. A token belongs to content if any of its characters does."""

    def __init__(self) -> None:
        self._at = 0
        """The position of the next token in the content."""
        self._was_content = False
        """Whether the last token belongs to content."""

    def place_entries(self, logprobs: Logprobs, entries: Iterable[Json], content: range) -> list[PlacedEntry]:
        """Returns the entries of content among those of a part, whose content has the positions ``content``. Tokens
        after it are those of a stop string."""
        placed: list[PlacedEntry] = []
        for text, length, entry in zip(logprobs.chosen_texts, logprobs.text_lengths, entries, strict=True):
            # A character of several tokens counts for the first of them.
            continues = self._was_content and _continues_character(text)
            self._was_content = (bool(length) and self._at < content.stop) or continues
            if self._was_content:
                placed.append((max(0, self._at - continues - content.start), entry))
            self._at += length
        return placed


def _continues_character(data: bytes) -> bool:
    return bool(data) and 0x80 <= data[0] < 0xC0

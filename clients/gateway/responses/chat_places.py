"""Which of an answer's tokens are its content: those of reasoning, calls and the marks around them are not.

Knows no formats: the parsers tell where in the text that the model wrote the content stands.
"""

import codecs
from collections import deque
from collections.abc import Sequence

from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.parsers.base import Spans
from penstock.clients.gateway.responses.logprobs import TokenNames

PlacedEntry = tuple[int, Json]
"""Log-probabilities of a token, and where it begins in the content of its part, in characters."""


class ContentTokens:
    """Of one choice: the tokens that came, until the content that they belong to is told. A token belongs to content if
    any character of it does."""

    def __init__(self, *, specials: bool) -> None:
        """``specials``: whether special tokens are in the text."""
        self._specials = specials
        self._num_read = 0
        self._waiting: deque[tuple[int, int, Json]] = deque()

    def add_tokens(self, text: str, token_ids: Sequence[int], entries: Sequence[Json], names: TokenNames) -> None:
        """More text with its tokens: whole characters, of which a stop string may have cut the last ones."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        at, self._num_read = self._num_read, self._num_read + len(text)
        for token_id, entry in zip(token_ids, entries, strict=True):
            is_shown = names.shown(token_id, specials=self._specials)
            begin = at
            at += len(decoder.decode(names.bytes(token_id) if is_shown else b""))
            in_character = bool(decoder.getstate()[0])
            end = min(at + in_character, self._num_read)
            if begin < end:
                self._waiting.append((begin, end, entry))

    def take_entries(self, spans: Spans) -> list[PlacedEntry]:
        """The entries of content that stands there; of what is before it, none will be taken any more."""
        taken: list[PlacedEntry] = []
        told = 0
        for begin, end in spans:
            while self._waiting and self._waiting[0][0] < end:
                token_begin, token_end, entry = self._waiting.popleft()
                if token_end > begin:
                    taken.append((told + max(0, token_begin - begin), entry))
            told += end - begin
        return taken

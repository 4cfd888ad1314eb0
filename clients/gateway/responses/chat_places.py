"""Finds the tokens of an answer's content, without those of reasoning, calls and their markers.

Independent of formats: the parsers report the position of the content in the model's text.
"""

import codecs
from collections import deque
from collections.abc import Sequence

from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.parsers.base import Spans
from penstock.clients.gateway.responses.logprobs import TokenNames

PlacedEntry = tuple[int, Json]
"""The log-probabilities of a token, and its position in the content of its part, in characters."""


class ContentTokens:
    """Holds the tokens of one choice until the position of their content is known. A token belongs to content if any of
    its characters does."""

    def __init__(self, *, specials: bool) -> None:
        """``specials``: whether special tokens are in the text."""
        self._specials = specials
        self._num_read = 0
        self._waiting: deque[tuple[int, int, Json]] = deque()

    def add_tokens(self, text: str, token_ids: Sequence[int], entries: Sequence[Json], names: TokenNames) -> None:
        """Adds text with its tokens: whole characters, the last of which a stop string may have cut off."""
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
        """Returns the entries of content at these positions, and drops those of earlier text."""
        taken: list[PlacedEntry] = []
        num_before = 0
        for begin, end in spans:
            while self._waiting and self._waiting[0][0] < end:
                token_begin, token_end, entry = self._waiting.popleft()
                if token_end > begin:
                    taken.append((num_before + max(0, token_begin - begin), entry))
            num_before += end - begin
        return taken

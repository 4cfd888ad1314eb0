"""The positions of a batch whose next token is chosen. Plain data; uses no tensors."""

from collections.abc import Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from penstock.models.batch.grammar_matcher import Words
from penstock.models.batch.rows import Ids, Row
from penstock.models.batch.token_counts import TokenCounts

NO_DRAFTS: Sequence[int] = ()


class SampledPosition:
    """The position after a row's history, as it was when the step began, and after its first drafts. The tokens chosen
    for earlier positions show whether these drafts are accepted."""

    __slots__ = ("drafts", "position", "row")

    def __init__(self, row: Row, drafts: Sequence[int] = NO_DRAFTS) -> None:
        self.row = row
        self.drafts = drafts
        self.position = len(row.history) + len(drafts)
        """The position of the token to choose."""

    @property
    def counts(self) -> TokenCounts | None:
        """The row's token counts, drafts included."""
        counts = self.row.counts
        return counts if counts is None or not self.drafts else counts.with_more(self.drafts)

    def tail(self, length: int) -> tuple[int, ...]:
        """Returns the last ``length`` tokens, or all if there are fewer. The row's own tokens must be known."""
        num_own = length - len(self.drafts)
        if num_own <= 0:
            return tuple(self.drafts[len(self.drafts) - length :])
        end = self.position - len(self.drafts)  # the history may have grown since
        return (*self.row.history[max(0, end - num_own) : end], *self.drafts)

    def forbidden_ids(self) -> Iterator[Ids]:
        """Yields the ids of tokens that must not come here, possibly repeated: stops before ``min_tokens``, and tokens
        that would complete a bad word."""
        row, sampling = self.row, self.row.sampling
        if self.position - row.num_prompt_tokens < sampling.min_tokens:
            yield row.lists.stops
        if not sampling.bad_words:
            return
        [last] = self.tail(1)
        words = [
            word[-1]
            for word in sampling.bad_words
            if len(word) == 1 or (word[-2] == last and self.tail(len(word) - 1) == word[:-1])
        ]
        if words:
            yield np.array(words, dtype=np.int64)


class MaskWords(Protocol):
    """Masks that are computed while the layers run."""

    def result(self) -> Words:
        """Waits for the masks: (masks, ceil(V / 32)) uint32. Bit v % 32 of word v // 32 is set if token v may come."""


@dataclass(frozen=True)
class GrammarBitmasks:
    """The tokens that grammars allow."""

    sampled: list[int]
    """Indices into the batch's sampled positions, ascending."""
    words: MaskWords
    late: AbstractSet[int] = field(default_factory=frozenset)
    """The numbers of the rows whose masks were late, known once ``words`` has its result. Tokens chosen for these rows
    are ignored, and their histories do not grow."""

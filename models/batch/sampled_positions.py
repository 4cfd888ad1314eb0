"""The positions of a batch whose next token is chosen. Plain data; uses no tensors."""

from collections.abc import Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from penstock.models.batch.grammar_matcher import Words
from penstock.models.batch.rows import Row
from penstock.models.batch.token_counts import TokenCounts
from penstock.models.batch.token_lists import TokenLists
from penstock.scheduler.plan import SamplingParams

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
    def sampling(self) -> SamplingParams:
        """The row's sampling parameters."""
        return self.row.sampling

    @property
    def lists(self) -> TokenLists:
        """The row's token lists."""
        return self.row.lists

    @property
    def counts(self) -> TokenCounts | None:
        """The row's token counts, drafts included."""
        counts = self.row.counts
        return counts if counts is None or not self.drafts else counts.with_more(self.drafts)

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt, drafts included."""
        return self.position - self.row.num_prompt_tokens

    def tail(self, length: int) -> tuple[int, ...]:
        """Returns the last ``length`` tokens, or all if there are fewer. The row's own tokens must be known."""
        num_own = length - len(self.drafts)
        if num_own <= 0:
            return tuple(self.drafts[len(self.drafts) - length :])
        return (*self.row.history[-num_own:], *self.drafts)


class MaskWords(Protocol):
    """Masks that are computed while the layers run."""

    def result(self) -> Words:
        """Waits for the masks: (masks, ceil(V / 32)) uint32. Bit v % 32 of word v // 32 is set if token v may come."""
        ...


@dataclass(frozen=True)
class GrammarBitmasks:
    """The tokens that grammars allow."""

    sampled: list[int]
    """Indices into the batch's sampled positions, ascending."""
    words: MaskWords
    """The masks of these positions."""
    late: AbstractSet[int] = field(default_factory=frozenset)
    """The numbers of the rows whose masks were late, known once ``words`` has its result. Tokens chosen for these rows
    are ignored, and their histories do not grow."""

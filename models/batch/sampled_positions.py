"""Lines of logits: the positions of a batch whose next token is chosen. Plain data; knows no tensors."""

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
    """The token that follows a row's history, as it was when the step began, and the first drafts after it. Whether
    these are right shows when the lines before it are chosen."""

    __slots__ = ("drafts", "position", "row")

    def __init__(self, row: Row, drafts: Sequence[int] = NO_DRAFTS) -> None:
        self.row = row
        self.drafts = drafts
        self.position = len(row.history) + len(drafts)
        """Of the token that is chosen."""

    @property
    def sampling(self) -> SamplingParams:
        """The row's."""
        return self.row.sampling

    @property
    def lists(self) -> TokenLists:
        """The row's."""
        return self.row.lists

    @property
    def counts(self) -> TokenCounts | None:
        """The row's, with the drafts."""
        counts = self.row.counts
        return counts if counts is None or not self.drafts else counts.with_more(self.drafts)

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt, drafts included."""
        return self.position - self.row.num_prompt_tokens

    def tail(self, length: int) -> tuple[int, ...]:
        """The last so many tokens, all there are if these are fewer. Not before the row's are known."""
        num_own = length - len(self.drafts)
        if num_own <= 0:
            return tuple(self.drafts[len(self.drafts) - length :])
        return (*self.row.history[-num_own:], *self.drafts)


class MaskWords(Protocol):
    """Masks that are computed while the layers run."""

    def result(self) -> Words:
        """Waits for them: (lines, ceil(V / 32)) uint32. Bit v % 32 of word v // 32 says whether token v may come."""
        ...


@dataclass(frozen=True)
class GrammarBitmasks:
    """Which tokens grammars allow."""

    sampled: list[int]
    """Indices of the batch's lines, ascending."""
    words: MaskWords
    """Of these lines."""
    late: AbstractSet[int] = field(default_factory=frozenset)
    """Numbers of the rows whose masks were late, once ``words`` was called: tokens chosen for them are ignored, and
    their histories do not grow."""

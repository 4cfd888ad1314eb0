"""What a head that drafts is asked, and answers: as arrays, whatever it runs on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.models.batch import Ids

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class HeadStep:
    """T tokens of R rows; the tokens of a row are neighbours. Rows with one token come first, longest context first.
    A position has the token after it, since that is what it helps to go on from."""

    token_ids: Ids
    """(T,)."""
    starts: Ids
    """(R,): position of each row's first token."""
    ends: Ids
    """(R,): position after its last."""
    tables: Ids
    """(R, at least the blocks of the longest row)."""
    block_size: int
    sampled: Ids
    """(S,): indices of the tokens after which one is drafted."""
    features: Floats | None = None
    """(T, feature layers * hidden): the model's hidden states, where they are known."""
    hidden: Floats | None = None
    """(T, hidden): what came of the step before, where they are not."""

    @cached_property
    def token_starts(self) -> Ids:
        """(R + 1,): row r's tokens are [token_starts[r], token_starts[r + 1])."""
        return np.concatenate(([0], np.cumsum(self.ends - self.starts)))

    @cached_property
    def positions(self) -> Ids:
        """(T,)."""
        return np.arange(len(self.token_ids)) + self._of_tokens(self.starts - self.token_starts[:-1])

    @property
    def slots(self) -> Ids:
        """(T,): where each token's KV is written: block * block_size + offset."""
        blocks, offsets = np.divmod(self.positions, self.block_size)
        return self.tables[self._of_tokens(np.arange(len(self.ends))), blocks] * self.block_size + offsets

    def _of_tokens(self, of_rows: Ids) -> Ids:
        return np.repeat(of_rows, self.ends - self.starts)


class HeadResult(NamedTuple):
    """What came of a step."""

    token_ids: list[int]
    """(S,): the likeliest, as the model numbers them."""
    probabilities: list[float]
    """(S,): what the head gives them."""
    hidden: Floats
    """(S, hidden): what the next step of each goes on from."""


class DraftHead(Protocol):
    """A loaded head, with pages for its keys and values. Not thread safe."""

    def renew(self, block_ids: Sequence[int]) -> None:
        """The blocks have a new owner, who will write them."""
        ...

    def run(self, step: HeadStep) -> HeadResult:
        """Computes a step, writing the KV of every token."""
        ...

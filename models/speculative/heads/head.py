"""The interface of draft heads: the inputs and results of a step as arrays, on any backend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from penstock.models.batch.batch import FeatureLines
from penstock.models.batch.rows import Ids

Floats = NDArray[np.float32]


class Draws(NamedTuple):
    """How S drafts are chosen: as the model chooses the tokens of their positions, except for penalties and filters."""

    temperatures: NDArray[np.float64]
    """(S,): 0 chooses the likeliest token."""
    seeds: NDArray[np.uint64]
    """(S,): seeds of the noise added to logits over the temperature, which is the model's own at that position."""
    positions: Ids
    """(S,): positions of the drafts in their rows."""

    def after(self, going_on: list[int]) -> "Draws":
        """Returns the draws of the next drafts, for the drafts at these indices."""
        return Draws(self.temperatures[going_on], self.seeds[going_on], self.positions[going_on] + 1)


NO_DRAWS = Draws(np.empty(0), np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64))


@dataclass(frozen=True)
class HeadStep:
    """T tokens of R rows; the tokens of a row are adjacent. Rows with one token come first, longest context first.
    Position p has token p + 1, with which the head continues from the hidden states at p."""

    token_ids: FeatureLines
    """(T,): on the host, or those that the previous step chose."""
    starts: Ids
    """(R,): position of each row's first token."""
    ends: Ids
    """(R,): position after each row's last token."""
    tables: Ids
    """(R, at least the blocks of the longest row)."""
    block_size: int
    sampled: Ids
    """(S,): indices of the tokens after which a token is drafted."""
    draws: Draws = NO_DRAWS
    features: Sequence[FeatureLines] | None = None
    """(T, feature layers * hidden), in parts: the model's hidden states, if they are known."""
    hidden: FeatureLines | None = None
    """(T, hidden): the previous step's ``HeadResult.hidden``, if they are not."""

    @cached_property
    def token_starts(self) -> Ids:
        """(R + 1,): row r's tokens are [token_starts[r], token_starts[r + 1])."""
        return np.concatenate(([0], np.cumsum(self.ends - self.starts)))

    @cached_property
    def positions(self) -> Ids:
        """(T,)."""
        return np.arange(self.token_starts[-1]) + self._of_tokens(self.starts - self.token_starts[:-1])

    @property
    def slots(self) -> Ids:
        """(T,): where each token's KV is written: block * block_size + offset."""
        blocks, offsets = np.divmod(self.positions, self.block_size)
        return self.tables[self._of_tokens(np.arange(len(self.ends))), blocks] * self.block_size + offsets

    def _of_tokens(self, of_rows: Ids) -> Ids:
        return np.repeat(of_rows, self.ends - self.starts)


class HeadDraft(NamedTuple):
    """A draft that the head chose."""

    token_id: int
    """An id of the model's vocabulary."""
    probability: float
    """The head's probability at temperature 1."""
    noise: float
    """The noise that it was drawn with; 0 if it was not drawn."""


class HeadResult(NamedTuple):
    """The result of a step."""

    drafts: Callable[[], list[HeadDraft]]
    """Waits for the S drafts and returns them."""
    token_ids: FeatureLines
    """(S,): their token ids. They can be passed to the next step without waiting."""
    hidden: FeatureLines
    """(S, hidden): what the next step continues from."""


class DraftHead(Protocol):
    """A loaded head, with pages for its keys and values. Not thread safe."""

    def reset_blocks(self, block_ids: Sequence[int]) -> None:
        """The blocks have a new owner, which will write them."""

    def run(self, step: HeadStep) -> HeadResult:
        """Computes a step, writing the KV of every token."""


def joined(parts: Sequence[FeatureLines]) -> Floats:
    """Returns the parts as one array. The backend must have them on the host."""
    return np.concatenate(cast("Sequence[Floats]", parts))


def ids_on_host(token_ids: FeatureLines) -> Ids:
    """Returns the ids as an array. The backend must have them on the host."""
    return cast("Ids", token_ids)

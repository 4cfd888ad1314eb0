"""What a head that drafts is asked, and answers: as arrays, whatever it runs on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from penstock.models.batch.batch import FeatureLines, Ids

Floats = NDArray[np.float32]


class Draws(NamedTuple):
    """How S drafts are chosen: as the model chooses the tokens of their positions, but for penalties and filters."""

    temperatures: NDArray[np.float64]
    """(S,): 0: the likeliest."""
    seeds: NDArray[np.uint64]
    """(S,): of the noise that is added to logits over the temperature, the model's own at that position."""
    positions: Ids
    """(S,): of the drafts in their rows."""

    def after(self, going_on: list[int]) -> "Draws":
        """Of the next drafts of some."""
        return Draws(self.temperatures[going_on], self.seeds[going_on], self.positions[going_on] + 1)


NO_DRAWS = Draws(np.empty(0), np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64))


@dataclass(frozen=True)
class HeadStep:
    """T tokens of R rows; the tokens of a row are neighbours. Rows with one token come first, longest context first.
    A position has the token after it, since that is what it helps to go on from."""

    token_ids: FeatureLines
    """(T,): on the host, or those that the step before chose."""
    starts: Ids
    """(R,): position of each row's first token."""
    ends: Ids
    """(R,): position after its last."""
    tables: Ids
    """(R, at least the blocks of the longest row)."""
    block_size: int
    sampled: Ids
    """(S,): indices of the tokens after which one is drafted."""
    draws: Draws = NO_DRAWS
    """Of these."""
    features: Sequence[FeatureLines] | None = None
    """(T, feature layers * hidden), in parts: the model's hidden states, where they are known."""
    hidden: FeatureLines | None = None
    """(T, hidden): what came of the step before, where they are not."""

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
    """What was chosen."""

    token_id: int
    """As the model numbers them."""
    probability: float
    """What the head gives it at temperature 1."""
    noise: float
    """That it was drawn with; 0: it was not drawn."""


class HeadResult(NamedTuple):
    """What came of a step."""

    told: Callable[[], list[HeadDraft]]
    """Waits for the S drafts."""
    token_ids: FeatureLines
    """(S,): their tokens, which the next step is given without waiting."""
    hidden: FeatureLines
    """(S, hidden): what the next step of each goes on from."""


class EagleHead(Protocol):
    """A loaded head, with pages for its keys and values. Not thread safe."""

    def reset_blocks(self, block_ids: Sequence[int]) -> None:
        """The blocks have a new owner, who will write them."""
        ...

    def run(self, step: HeadStep) -> HeadResult:
        """Computes a step, writing the KV of every token."""
        ...


def joined(parts: Sequence[FeatureLines]) -> Floats:
    """Parts, one behind the other, of a backend that has them on the host."""
    return np.concatenate(cast("Sequence[Floats]", parts))


def ids_on_host(token_ids: FeatureLines) -> Ids:
    """Of such a backend."""
    return cast("Ids", token_ids)

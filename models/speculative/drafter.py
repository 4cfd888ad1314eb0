"""What proposes drafts: the interface, which each method has an implementation of (``drafters.py``)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from penstock.models.batch.batch import Batch, FeatureLines
from penstock.models.batch.rows import Row, RowTable


class Wanted(NamedTuple):
    """A row that may be drafted for."""

    row: Row
    max_drafts: int
    """At least 1."""


class Proposal(NamedTuple):
    """What may follow a row's history."""

    token_ids: list[int]
    confidences: list[float]
    """For each of them from 0 to 1 how likely it is right, if those before it are; right in its order rather than in
    its amount, since what comes of drafts corrects it."""


NO_PROPOSAL = Proposal([], [])


class Drafter(ABC):
    """Proposes drafts. Rows' histories are known whenever it is asked; it finds out itself what is new in them."""

    by_rounds = False
    """Whether a draft takes a step of a model of its own, of all rows together: then it is asked for no more than what
    is expected to pay."""
    feature_layers: tuple[int, ...] = ()
    """Before which layers it wants the model's hidden states, of rows that it follows."""

    def is_ready(self, row: Row) -> bool:
        """Whether it can draft for a row, which it follows if it follows any, once the row's tokens are known."""
        return True

    def backlog(self, row: Row) -> int:
        """Tokens that it would read of a row if it were asked for it now, besides the newest."""
        return 0

    def follow(self, row: Row) -> None:  # noqa: B027
        """From now on it is given the row's hidden states, which it keeps: until ``leave`` or ``drop_row``."""

    def leave(self, row: Row) -> None:  # noqa: B027
        """It follows the row no more."""

    def read(self, batch: Batch, features: FeatureLines) -> None:  # noqa: B027
        """The hidden states of a batch, (T, feature layers * hidden), after what it chose was added to the rows. Who
        follows no row is given none."""

    def attach(self, table: RowTable) -> None:  # noqa: B027
        """Called once, before all else: all rows. Who drafts from text alone needs no more than it is given later."""

    def reset_blocks(self, block_ids: Sequence[int]) -> None:  # noqa: B027
        """Blocks have another content than they had. Who keeps nothing by blocks need not know."""

    @abstractmethod
    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        """One for each row; none of its tokens is fine."""

    @abstractmethod
    def drop_row(self, row: Row) -> None:
        """The row is dropped; what it output may help others of its tenant. Its last tokens may be ``UNKNOWN``."""


def valid_part(wanted: Wanted, proposal: Proposal) -> Proposal:
    """Returns the part of a proposal that the row's grammar allows."""
    row, most = wanted
    if row.matcher is None or not proposal.token_ids:
        return proposal
    count = row.matcher.num_valid(row.history, proposal.token_ids[:most])
    return Proposal(proposal.token_ids[:count], proposal.confidences[:count])

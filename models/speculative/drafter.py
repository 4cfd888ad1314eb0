"""The interface of drafters, which propose drafts. There is one for each method (``models/worker/speculation.py``)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from penstock.models.batch.batch import Batch, FeatureLines
from penstock.models.batch.rows import Row, RowTable


class Wanted(NamedTuple):
    """A row to draft for."""

    row: Row
    max_drafts: int
    """At least 1."""


class Proposal(NamedTuple):
    """What may follow a row's history."""

    token_ids: list[int]
    confidences: list[float]
    """The probability, from 0 to 1, that each token is right if those before it are. The order matters more than the
    values, which are corrected by the results of drafts."""
    is_predicted: bool = False
    """Whether the tokens come from the row's prediction."""


NO_PROPOSAL = Proposal([], [])


class Drafter(ABC):
    """Proposes drafts. Whenever it is called, the rows' histories are complete. It finds what is new in them."""

    by_rounds = False
    """Whether each draft takes a step of a model, for all rows. Then only drafts that should pay are requested."""
    feature_layers: tuple[int, ...] = ()
    """The layers before which it needs the model's hidden states, for the rows that it follows."""

    def is_ready(self, row: Row) -> bool:
        """Returns whether it can draft for a row, which it must follow if it follows rows."""
        return True

    def backlog(self, row: Row) -> int:
        """Returns how many tokens of a row the next proposal has to read besides the newest."""
        return 0

    def follow(self, row: Row) -> None:  # noqa: B027
        """Follows a row: from now on ``read`` keeps its hidden states, until ``leave`` or ``drop_row``."""

    def leave(self, row: Row) -> None:  # noqa: B027
        """Stops following a row."""

    def read(self, batch: Batch, features: FeatureLines) -> None:  # noqa: B027
        """Receives the hidden states of a batch, (T, feature layers * hidden), after its new tokens were added to the
        rows. Not called while the drafter follows no row."""

    def attach(self, table: RowTable) -> None:  # noqa: B027
        """Sets the table of all rows. Called once, before everything else. Drafters that only use text ignore it."""

    def reset_blocks(self, block_ids: Sequence[int]) -> None:  # noqa: B027
        """Called when blocks have new content. Drafters that keep nothing by block ignore it."""

    @abstractmethod
    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        """Returns one proposal per row, which may be empty."""

    @abstractmethod
    def drop_row(self, row: Row) -> None:
        """Drops a row. Its output may help other rows of its tenant. Its last tokens may be ``UNKNOWN``."""


def valid_part(wanted: Wanted, proposal: Proposal) -> Proposal:
    """Returns the part of a proposal that the row's grammar allows."""
    row, most = wanted
    if row.matcher is None or not proposal.token_ids:
        return proposal
    count = row.matcher.num_valid(row.history, proposal.token_ids[:most])
    return proposal._replace(token_ids=proposal.token_ids[:count], confidences=proposal.confidences[:count])


class NoDrafter(Drafter):
    """Proposes nothing."""

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        return [NO_PROPOSAL] * len(wanted)

    def drop_row(self, row: Row) -> None:
        pass

"""The rows that may have drafts, and which of them the drafter follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.models.batch.rows import Row
from penstock.models.speculative.acceptance import AcceptanceEstimate, RowAcceptance
from penstock.models.speculative.drafter import Drafter, Proposal

TRIAL = 4
"""The number of proposals in the trial of a row."""


class RowRecord:
    """The state of a row that may have drafts."""

    __slots__ = (
        "_predicted", "acceptance", "is_followed", "max_drafts", "probed_at", "proposed_at", "trials_left", "worth_s"
    )  # fmt: skip

    def __init__(self, max_drafts: int, classes: AcceptanceEstimate, worth_s: float) -> None:
        """``classes`` is the estimate for all rows that are sampled alike."""
        self.max_drafts = max_drafts
        self.acceptance = RowAcceptance(max_drafts, classes)
        self._predicted: RowAcceptance | None = None
        """The estimate for drafts from the row's own prediction, once there are any."""
        self.worth_s = worth_s
        """The seconds that drafting for the row saves per step, on recent average."""
        self.proposed_at = self.probed_at = 0
        """The last steps in which a draft was proposed, and computed, for the row although that did not pay."""
        self.is_followed = False
        """Whether the drafter reads the row's hidden states."""
        self.trials_left = 0
        """The number of proposals left in the row's trial; 0 if it is not on trial."""

    def acceptance_of(self, is_predicted: bool) -> RowAcceptance:
        """Returns the estimate for drafts from the row's prediction, or for the drafter's."""
        if not is_predicted:
            return self.acceptance
        if self._predicted is None:
            self._predicted = RowAcceptance(self.max_drafts, AcceptanceEstimate())
        return self._predicted

    def better(self, proposed: Proposal, predicted: Proposal) -> Proposal:
        """Returns the proposal from which more tokens are expected: the drafter's or that of the row's prediction."""
        if not predicted.confidences:
            return proposed
        expected = [
            sum(self.acceptance_of(one.is_predicted).estimate(one.confidences)) for one in (proposed, predicted)
        ]
        return proposed if expected[0] > expected[1] else predicted


class Tested(NamedTuple):
    """The drafts of a row that a step tests."""

    record: RowRecord
    confidences: list[float]
    is_predicted: bool
    """Whether they come from the row's prediction."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts of a step."""

    drafts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """The drafts by row number."""
    tested: Mapping[int, Tested] = field(default_factory=dict)
    """The drafts that came from a drafter or a prediction, by row number."""
    seconds: float = 0.0
    """How long drafting took."""


NOTHING = Drafted()


class DraftedRows:
    """Records by row. A drafter that reads hidden states follows the rows that pay and at most one other, on trial."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._reads = bool(drafter.feature_layers)
        self._records: dict[Row, RowRecord] = {}
        self.num_paying = 0
        """The number of rows whose ``worth_s`` is not negative."""
        self.num_followed = 0
        self.num_on_trial = 0

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, row: Row) -> RowRecord:
        return self._records[row]

    def get(self, row: Row) -> RowRecord | None:
        """Returns the record of a row, or None if it may not have drafts."""
        return self._records.get(row)

    def add_row(self, row: Row, record: RowRecord, may_try: bool) -> None:
        """Adds a row. ``may_try`` is whether there is time for a trial. New rows are the best ones to try, since the
        drafter reads them from the start. If the drafter does not read, the row may be known, and gets a new record."""
        known = self._records.get(row)
        self.num_paying -= known is not None and known.worth_s >= 0.0
        self._records[row] = record
        does_pay = record.worth_s >= 0.0
        self.num_paying += does_pay
        if self._reads and does_pay:
            self._follow(row, record)
        elif self._reads and may_try:
            self.begin_trial(row, record)

    def drop_row(self, row: Row) -> None:
        record = self._records.pop(row, None)
        if record is not None:
            self.num_paying -= record.worth_s >= 0.0
            self.num_followed -= record.is_followed
            self.num_on_trial -= record.trials_left > 0
            self._drafter.drop_row(row)

    def set_worth(self, row: Row, record: RowRecord, worth_s: float) -> None:
        """Sets the worth of a row. The drafter leaves a row that does not pay any more, unless it is on trial."""
        did_pay, record.worth_s = record.worth_s >= 0.0, worth_s
        does_pay = worth_s >= 0.0
        self.num_paying += does_pay - did_pay
        if record.is_followed and not does_pay and not record.trials_left:
            self._leave(row, record)

    def begin_trial(self, row: Row, record: RowRecord) -> None:
        """Makes the drafter follow a row that does not pay, for ``TRIAL`` proposals."""
        record.trials_left = TRIAL
        self.num_on_trial += 1
        self._follow(row, record)

    def try_again(self, row: Row, record: RowRecord) -> None:
        """Counts a proposal for a row on trial, and ends the trial after the last one."""
        record.trials_left -= 1
        if not record.trials_left:
            self.num_on_trial -= 1
            if record.worth_s < 0.0:
                self._leave(row, record)

    def _follow(self, row: Row, record: RowRecord) -> None:
        record.is_followed = True
        self.num_followed += 1
        self._drafter.follow(row)

    def _leave(self, row: Row, record: RowRecord) -> None:
        record.is_followed = False
        self.num_followed -= 1
        self._drafter.leave(row)

"""The rows that may be drafted for, and which of them a drafter follows."""

from penstock.models.batch.rows import Row
from penstock.models.speculative.acceptance import RowAcceptance
from penstock.models.speculative.drafter import Drafter

TRIAL = 4
"""Askings in which a row that a drafter follows is found out about."""


class RowRecord:
    """What is remembered of a row that may be drafted for."""

    __slots__ = ("acceptance", "asked_at", "is_followed", "max_drafts", "trials_left", "tried_at", "worth_s")

    def __init__(self, max_drafts: int, acceptance: RowAcceptance, worth_s: float) -> None:
        self.max_drafts = max_drafts
        self.acceptance = acceptance
        self.worth_s = worth_s
        """Seconds that a step gains by asking for it: of late, on average."""
        self.asked_at = self.tried_at = 0
        """The last steps in which it was asked for, and had a draft, though that did not pay."""
        self.is_followed = False
        """Whether the drafter reads along."""
        self.trials_left = 0
        """Askings, though they do not pay, until the drafter leaves it."""


class DraftedRows:
    """Records by row. A drafter that reads along follows those that pay, and at most one other, which is on trial."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._reads = bool(drafter.feature_layers)
        self._records: dict[Row, RowRecord] = {}
        self.num_paying = 0
        """Rows whose ``worth_s`` is not negative."""
        self.num_followed = 0
        self.num_on_trial = 0

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, row: Row) -> RowRecord:
        return self._records[row]

    def get(self, row: Row) -> RowRecord | None:
        """None: nothing may be drafted for it."""
        return self._records.get(row)

    def add_row(self, row: Row, record: RowRecord, may_try: bool) -> None:
        """A row begins; ``may_try``: there is time for what does not pay. A row that has just begun is the best to be
        on trial, since the drafter reads it whole."""
        self._records[row] = record
        does_pay = record.worth_s >= 0.0
        self.num_paying += does_pay
        if self._reads and does_pay:
            self._follow(row, record)
        elif self._reads and may_try:
            self.begin_trial(row, record)

    def drop_row(self, row: Row) -> None:
        """A row is dropped."""
        record = self._records.pop(row, None)
        if record is not None:
            self.num_paying -= record.worth_s >= 0.0
            self.num_followed -= record.is_followed
            self.num_on_trial -= record.trials_left > 0
            self._drafter.drop_row(row)

    def set_worth(self, row: Row, record: RowRecord, worth_s: float) -> None:
        """Whoever does not pay any more is left."""
        did_pay, record.worth_s = record.worth_s >= 0.0, worth_s
        does_pay = worth_s >= 0.0
        self.num_paying += does_pay - did_pay
        if record.is_followed and not does_pay and not record.trials_left:
            self._leave(row, record)

    def begin_trial(self, row: Row, record: RowRecord) -> None:
        """The drafter follows a row though it does not pay, until it was asked for it a few times."""
        record.trials_left = TRIAL
        self.num_on_trial += 1
        self._follow(row, record)

    def try_again(self, row: Row, record: RowRecord) -> None:
        """An asking of a row on trial had an answer."""
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

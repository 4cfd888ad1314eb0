"""What rows may go on with: tokens that are computed in the hope that they will be chosen. Those that are not cost
time, and change nothing."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.models.rows import Row, RowTable
from penstock.scheduler.plan import StepPlan


class Wanted(NamedTuple):
    """A row that may be drafted for."""

    row: Row
    max_drafts: int
    """At least 1."""


class Drafter(Protocol):
    """Proposes drafts. Rows' histories are known whenever it is asked; it finds out itself what is new in them."""

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """For each row what may follow its history, the likeliest continuation first to last; none is fine."""
        ...

    def forget(self, row: Row) -> None:
        """The row is dropped; what it output may help others of its tenant."""
        ...


class Drafting:
    """Chooses for each step what is drafted."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def draft(self, table: RowTable, plan: StepPlan) -> Mapping[int, Sequence[int]]:
        """By row number, for rows that the plan continues; within its bounds. All rows' tokens must be known."""
        wanted = []
        for decode in plan.decodes:
            row = table[decode.row]
            max_drafts = min(decode.max_tokens - 1, row.max_drafts, plan.max_drafts)
            if max_drafts > 0:
                wanted.append(Wanted(row, max_drafts))
        drafts: dict[int, Sequence[int]] = {}
        room = plan.max_drafts
        if wanted:
            for (row, max_drafts), proposed in zip(wanted, self._drafter.propose(wanted), strict=True):
                if proposed and room:
                    drafts[row.number] = proposed[: min(max_drafts, room)]
                    room -= len(drafts[row.number])
        return drafts

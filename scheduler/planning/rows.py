"""Allocates row numbers and counts their uses. It does not know what a row computes.

The states of a number:  free -> held -> dropped, waits for the next plan -> in a plan -> plan has its result -> free.
So a result's (row, epoch) always identifies its sequence, however late it arrives, and the worker never sees a number
used again while a plan with its last use is in flight.
"""

from penstock.scheduler.planning.sequence import SequenceState


class RowIdAllocator:
    """Assigns row numbers to sequences."""

    def __init__(self, num_rows: int) -> None:
        self._holders: list[SequenceState | None] = [None] * num_rows
        self._epochs = [0] * num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._dropped: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate_row(self, holder: SequenceState) -> tuple[int, int]:
        """Returns a free row number and the epoch of this use."""
        row = self._free.pop()
        self._holders[row] = holder
        self._epochs[row] += 1
        if (adapter := holder.live.request.adapter) is not None:
            adapter.num_rows += 1
        return row, self._epochs[row]

    def free_row(self, row: int) -> None:
        """Ends a row: the next plan drops it."""
        assert row not in self._dropped
        self._dropped.append(row)
        holder = self.current(row)
        if (adapter := holder.live.request.adapter) is not None:
            adapter.end_row(holder.planned_at)

    def take_drops(self) -> list[int]:
        """Returns the rows that the next plan must drop. They must be passed to ``reclaim`` after its result."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def reclaim(self, rows: list[int]) -> None:
        """Frees the numbers of dropped rows, after the result of the plan that dropped them: nothing in flight names
        them."""
        for row in rows:
            self._holders[row] = None
        self._free += rows

    def clear(self) -> None:
        """Frees all rows, because the worker is gone: no result will come."""
        self._holders = [None] * len(self._holders)
        self._free = list(range(len(self._holders) - 1, -1, -1))
        self._dropped = []

    def current(self, row: int) -> SequenceState:
        holder = self._holders[row]
        assert holder is not None
        return holder

    def holder(self, row: int, epoch: int) -> SequenceState:
        """Returns the holder to which a result refers; its row may have been dropped since."""
        holder = self._holders[row]
        assert holder is not None, f"a result names row {row}, which is not in use"
        assert self._epochs[row] == epoch, f"a result names epoch {epoch} of row {row}, not {self._epochs[row]}"
        return holder

"""Row numbers, and the lives that they had. Knows nothing of what a row computes.

A number goes round:  free -> held -> dropped, to be said in the next plan -> said -> that plan is answered -> free.
So an answer's (row, epoch) always tells whose it is, however late it comes, and the worker never sees a number begin a
second life while a plan of the first is on its way.
"""

from typing import Generic, TypeVar

Holder = TypeVar("Holder")


class RowIdAllocator(Generic[Holder]):
    """Who holds which row number."""

    def __init__(self, num_rows: int) -> None:
        self._holders: list[Holder | None] = [None] * num_rows
        self._epochs = [0] * num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._dropped: list[int] = []

    @property
    def num_free(self) -> int:
        """Numbers that can be taken now."""
        return len(self._free)

    def allocate_row(self, holder: Holder) -> tuple[int, int]:
        """A free row number and the epoch of its new life."""
        row = self._free.pop()
        self._holders[row] = holder
        self._epochs[row] += 1
        return row, self._epochs[row]

    def free_row(self, row: int) -> None:
        """The row ends: the next plan says so."""
        assert row not in self._dropped
        self._dropped.append(row)

    def say_drops(self) -> list[int]:
        """The rows that the plan in the making must drop. ``reclaim`` them when it is answered."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def reclaim(self, rows: list[int]) -> None:
        """The plan that dropped these rows is answered: nothing on its way names them any more."""
        for row in rows:
            self._holders[row] = None
            self._free.append(row)

    def clear(self) -> None:
        """The worker is gone: nobody holds a row, and no answer will come."""
        self._holders = [None] * len(self._holders)
        self._free = list(range(len(self._holders) - 1, -1, -1))
        self._dropped = []

    def current(self, row: int) -> Holder:
        """Whose row this is now."""
        holder = self._holders[row]
        assert holder is not None
        return holder

    def holder(self, row: int, epoch: int) -> Holder:
        """Whose life an answer speaks of: still running, dropped, or said to be."""
        holder = self._holders[row]
        assert holder is not None, f"an answer names row {row}, which nobody holds"
        assert self._epochs[row] == epoch, f"an answer names epoch {epoch} of row {row}, not {self._epochs[row]}"
        return holder

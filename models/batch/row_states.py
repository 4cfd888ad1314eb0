"""The recurrent states of rows: their slots, and the positions at which they are saved. Uses no tensors."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Save(NamedTuple):
    """A copy of a state, taken after this many of the tokens that advance it."""

    num_tokens: int
    slot: int


class StateStep(NamedTuple):
    """How a step advances the state of a row."""

    slot: int
    certain: int
    """The number of the row's tokens that are certain: they advance the state. Those after them are computed from a
    copy of it, and advance it once they are accepted."""
    saves: list[Save]
    """Copies on the way, in ascending order."""


class StateCommit(NamedTuple):
    """The accepted ones of a row's tokens that a step computed from a copy of its state. They advance it now."""

    row: int
    """The row's index in the batch."""
    num_tokens: int
    saves: list[Save]


@dataclass(slots=True)
class RowState:
    """A row's slot, and where its state is still to be saved."""

    slot: int
    snapshots: list[tuple[int, int]] = field(default_factory=list)
    """Positions and slots."""

    def take_saves(self, start: int, end: int) -> list[Save]:
        """Returns the copies to take on the way from position ``start`` to ``end``, and forgets them here."""
        due = sorted(snapshot for snapshot in self.snapshots if snapshot[0] <= end)
        if due:
            self.snapshots = [snapshot for snapshot in self.snapshots if snapshot[0] > end]
        return [Save(position - start, slot) for position, slot in due]

"""The KV cache of a worker whose layers are in groups: a block of a windowed group is read only within the window.

Reading a block that belongs to another row by now, or that was never written, raises ``BrokenPlan``. A row has a window
block for every token that it computes, and for those that its next one sees.
"""

from collections.abc import Sequence

from penstock.scheduler.testing.fake_states import BrokenPlan
from penstock.scheduler.testing.fake_worker import CheckedSlots, FakeRow
from penstock.scheduler.worker_config import WorkerFacts


class WindowedSlots(CheckedSlots):
    """Tracks each slot's KV in all groups, which share the blocks."""

    def __init__(self, facts: WorkerFacts) -> None:
        super().__init__(facts.num_blocks, facts.block_size, facts.num_host_blocks)
        self._groups = facts.groups

    def grow_window(self, row: FakeRow, block_ids: Sequence[int]) -> None:
        """Checks that group 0 of no row has the blocks."""
        for block in block_ids:
            if self._num_holders[block]:
                raise BrokenPlan(f"row {row.number} is given block {block}, which another row holds")
            self._writers[block] = (row.number, row.epoch)
            self._tags[block] = [None] * self._block_size

    def read(self, row: FakeRow, stop: int) -> None:
        """Checks that each slot that a query at ``stop`` sees holds the KV of the row's own history."""
        super().read(row, stop)
        for position in range(max(0, stop - self._groups.window + 1), stop):
            for group, block in enumerate(self._blocks_at(row, position)):
                if self._tags[block][position % self._block_size] != _tag(row, position, group):
                    raise BrokenPlan(f"row {row.number} reads foreign or stale KV of a window in block {block}")

    def write(self, row: FakeRow, start: int, stop: int) -> None:
        """Checks that the blocks were given to the row as new."""
        super().write(row, start, stop)
        for position in range(start, stop):
            for group, block in enumerate(self._blocks_at(row, position)):
                self._put(row, block, position, _tag(row, position, group))

    def spoil(self, row: FakeRow, start: int, stop: int) -> None:
        super().spoil(row, start, stop)
        for position in range(start, stop):
            for block in self._blocks_at(row, position):
                self._put(row, block, position, None)

    def _blocks_at(self, row: FakeRow, position: int) -> list[int]:
        """Returns the blocks of the windowed groups that have a position."""
        number = self._groups.num_windowed
        first = (position // self._block_size - row.window_start) * number
        if first < 0 or first + number > len(row.window_ids):
            raise BrokenPlan(f"row {row.number} has no blocks for the window of position {position}")
        return row.window_ids[first : first + number]

    def _put(self, row: FakeRow, block: int, position: int, tag: int | None) -> None:
        if self._writers[block] != (row.number, row.epoch):
            raise BrokenPlan(f"row {row.number} writes to block {block}, which is not its own")
        self._tags[block][position % self._block_size] = tag


def _tag(row: FakeRow, position: int, group: int) -> int:
    """Returns the tag of a position's KV in a windowed group."""
    return hash((row.tags[position], group))

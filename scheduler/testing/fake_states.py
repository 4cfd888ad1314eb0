"""The recurrent states of a worker without a model. A state is a digest of all tokens so far.

Computing with a wrong state, saving one where another row's is expected, or overwriting one that is still to be saved
raises ``BrokenPlan``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.scheduler.plan import NO_SLOT, AddedRow, StateSnapshot


class BrokenPlan(AssertionError):
    """A plan that would make a real worker compute wrong results."""


@dataclass(slots=True)
class _StatefulRow:
    """The slots of a row."""

    live: int
    num_computed: int
    digests: list[int] = field(default_factory=lambda: [0])
    """The right state after each number of tokens."""
    named: dict[int, int] = field(default_factory=dict)
    """Slots by the positions at which the state will be saved."""

    def right(self, history: Sequence[int], num_tokens: int) -> int:
        """Returns the right state after this many tokens."""
        digests = self.digests
        while len(digests) <= num_tokens:
            digests.append(hash((digests[-1], history[len(digests) - 1])))
        return digests[num_tokens]


class FakeStates:
    """The slots of a worker, and what is in them. A model without recurrent layers has none."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        self._states: list[int | None] = [None] * num_slots
        """None: nothing was saved there."""
        self._rows: dict[int, _StatefulRow] = {}

    def start_rows(self, added: Sequence[AddedRow]) -> None:
        """Begins the rows of a plan: first copies the states that they begin with."""
        if not self._states:
            if any((row.state_slot, row.state_source) != (NO_SLOT, NO_SLOT) for row in added):
                raise BrokenPlan("a row has a slot, and the model has no states")
            return
        sources = {row.state_source for row in added if row.state_source not in (NO_SLOT, row.state_slot)}
        for row in added:
            if row.state_slot in sources:
                raise BrokenPlan(f"row {row.row} begins in slot {row.state_slot}, from which another row begins")
            self._start_row(row)

    def _start_row(self, added: AddedRow) -> None:
        slot, source = added.state_slot, added.state_source
        if not 0 <= slot < len(self._states):
            raise BrokenPlan(f"row {added.row} begins in slot {slot}, which does not exist")
        self._check_unused(slot, f"row {added.row} begins")
        if (source == NO_SLOT) != (added.num_computed == 0):
            raise BrokenPlan(f"row {added.row} begins after {added.num_computed} tokens, with the state of {source}")
        self._states[slot] = 0 if source == NO_SLOT else self._states[source]
        self._rows[added.row] = _StatefulRow(slot, added.num_computed)
        self._check_live(added.row, added.token_ids)

    def _check_unused(self, slot: int, what: str) -> None:
        for number, row in self._rows.items():
            if row.live == slot or slot in row.named.values():
                raise BrokenPlan(f"{what} in slot {slot}, which belongs to row {number}")

    def _check_live(self, number: int, history: Sequence[int]) -> None:
        row = self._rows[number]
        if self._states[row.live] != row.right(history, row.num_computed):
            raise BrokenPlan(f"row {number} has a foreign or stale state in slot {row.live}")

    def end_row(self, number: int) -> None:
        """Releases a row's slots."""
        self._rows.pop(number, None)

    def name_slots(self, snapshots: Sequence[StateSnapshot]) -> None:
        """Takes note of the positions at which rows will save their states."""
        for snapshot in snapshots:
            row = self._rows[snapshot.row]
            if snapshot.position % self._block_size or snapshot.position <= row.num_computed:
                raise BrokenPlan(f"row {snapshot.row} cannot save its state at {snapshot.position}")
            if snapshot.position in row.named:
                raise BrokenPlan(f"row {snapshot.row} saves its state at {snapshot.position} twice")
            self._check_unused(snapshot.slot, f"row {snapshot.row} saves its state")
            row.named[snapshot.position] = snapshot.slot
            self._states[snapshot.slot] = None

    def advance(self, number: int, history: Sequence[int], num_computed: int) -> None:
        """Advances a row's state to this many tokens, and saves it at positions on the way."""
        row = self._rows.get(number)
        if row is None:
            return
        self._check_live(number, history)
        row.num_computed = num_computed
        self._states[row.live] = row.right(history, num_computed)
        for position in [position for position in row.named if position <= num_computed]:
            self._states[row.named.pop(position)] = row.right(history, position)

"""Tracks the slots of recurrent states: which row has which, and which snapshots can be found. It knows slot numbers,
hashes and positions, never tokens or requests.

Every slot is in exactly one state:

    blank       on a stack
    live        the state of a running row, its owner
    named       its owner saves the state there at a position, and no result has confirmed that. If the hash of the
                block that ends there is known, it finds the slot from the plan after the one that computes the position
    cached      a snapshot that its hash finds, in the LRU

Blank slots are given out first, then cached ones, least recently used first. Snapshots whose blocks are retained are
skipped, unless the oldest snapshots, as many as half of the slots, are all of this kind. The hash of a snapshot is
that of a block whose KV can be found.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple


class NamedSlot(NamedTuple):
    """A slot for the state of a row at a position that no result has confirmed."""

    slot: int
    block_hash: bytes | None
    """None: it is known with the result."""
    is_passed: bool
    """Whether it is given up once a later one of the same kind is confirmed."""


class PassedSnapshot(NamedTuple):
    """A confirmed snapshot at a border that its owner has passed."""

    position: int
    slot: int
    block_hash: bytes


@dataclass(slots=True, eq=False)
class RowSlots:
    """The slots of a running row, and its plans for more."""

    live: int
    named: dict[int, NamedSlot] = field(default_factory=dict)
    """The slots by position, in ascending order."""
    passed: list[PassedSnapshot] = field(default_factory=list)
    """Oldest first. Some may have been evicted."""
    wanted: dict[int, bytes | None] = field(default_factory=dict)
    """Positions of the known history at which its state will be saved; a hash, where others want that."""
    next_border: int = 0
    """The first position after the known history for which no slot was requested yet."""


class StatePool:
    """The slots, the map from hash to snapshot, and eviction. A pool without slots does nothing."""

    def __init__(
        self,
        num_slots: int,
        has_block: Callable[[bytes], object] = lambda _: True,
        is_retained: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        """``has_block`` returns whether a hash finds a block; otherwise no snapshot has this hash. ``is_retained``
        returns whether that block is kept in preference to others."""
        self.num_slots = num_slots
        self.on_changed: Callable[[bytes], None] = lambda block_hash: None
        """Called after a snapshot with this hash can be found, or no longer can."""
        self._has_block = has_block
        self._is_retained = is_retained
        self.reset()

    def reset(self) -> None:
        """Empties the pool, because all states are gone: no row has a slot, and no hash finds one."""
        # Popped from the end, so that a new pool gives out 0, 1, 2, ...
        self._blanks = list(range(self.num_slots - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hashes: list[bytes | None] = [None] * self.num_slots
        self._by_hash: dict[bytes, int] = {}
        self._rows: dict[Hashable, RowSlots] = {}
        self._leaders: dict[bytes, Hashable] = {}
        self._reused: set[int] = set()
        """Slots with snapshots from which rows have begun."""
        self._sources: set[int] = set()
        """Slots from which rows of the next plan begin. That plan writes to none of them."""

    @property
    def num_used(self) -> int:
        """The number of slots that are not blank."""
        return self.num_slots - len(self._blanks)

    @property
    def num_snapshots(self) -> int:
        """The number of slots that hold a snapshot, or will hold one."""
        return self.num_used - len(self._rows)

    @property
    def has_free(self) -> bool:
        """Whether another row can begin now."""
        return bool(self._blanks) or any(slot not in self._sources for slot in self._cached)

    def find(self, block_hash: bytes) -> int | None:
        """Returns the slot with the state at the end of the block with this hash."""
        return self._by_hash.get(block_hash)

    def row(self, owner: Hashable) -> RowSlots:
        """Returns the slots of a running row."""
        return self._rows[owner]

    def start_row(self, owner: Hashable, source_hash: bytes | None) -> tuple[int, int | None]:
        """Gives a row its live slot; returns it, and the slot whose state is copied to it first. The caller has checked
        ``has_free``.

        If no other slot is free, the row takes over the snapshot itself, and both are the same.
        """
        source = None if source_hash is None else self._by_hash[source_hash]
        slot = self._take(but=source)
        if slot is None:
            assert source is not None, "a row begins without a free slot"
            assert source in self._cached, "a row takes over a snapshot that is not confirmed"
            assert source not in self._sources, "two rows take over a snapshot"
            slot = source
            del self._cached[slot]
            self._forget(slot)
        elif source is not None:
            self._sources.add(source)
            self._reused.add(source)
            if source in self._cached:
                self._cached.move_to_end(source)
        self._rows[owner] = RowSlots(slot)
        return slot, source

    def _take(self, but: int | None = None) -> int | None:
        if self._blanks:
            return self._blanks.pop()
        slot = self._next_evicted(but)
        if slot is not None:
            del self._cached[slot]
            self._forget(slot)
        return slot

    def _next_evicted(self, but: int | None) -> int | None:
        free = (slot for slot in self._cached if slot != but and slot not in self._sources)
        oldest: int | None = None
        for slot in islice(free, max(1, self.num_slots // 2)):
            block_hash = self._hashes[slot]
            assert block_hash is not None
            if not self._is_retained(block_hash):
                return slot
            oldest = slot if oldest is None else oldest
        return oldest

    def _forget(self, slot: int) -> None:
        """Lets no hash find a slot."""
        block_hash = self._hashes[slot]
        assert block_hash is not None
        del self._by_hash[block_hash]
        self._hashes[slot] = None
        self._reused.discard(slot)
        self.on_changed(block_hash)

    def _remember(self, slot: int, block_hash: bytes) -> None:
        """Lets a hash find a slot, unless it finds another one already: equal hashes mean equal states."""
        if block_hash not in self._by_hash and self._has_block(block_hash):
            self._by_hash[block_hash] = slot
            self._hashes[slot] = block_hash
            self.on_changed(block_hash)

    def name_slot(
        self, owner: Hashable, position: int, block_hash: bytes | None, *, is_passed: bool = False
    ) -> int | None:
        """Returns a slot for the state of a row at ``position``, which the next plan names; None if no slot is free, or
        if the snapshot exists. With a ``block_hash``, the next plan computes the position, and rows of all plans after
        it may begin there."""
        if block_hash is not None and block_hash in self._by_hash:
            return None
        slot = self._take()
        if slot is not None:
            self._rows[owner].named[position] = NamedSlot(slot, block_hash, is_passed)
            if block_hash is not None:
                self._remember(slot, block_hash)
        return slot

    def confirm(self, owner: Hashable, num_computed: int, hashes: Sequence[bytes], block_size: int) -> None:
        """Records that a row's state was saved at all positions up to ``num_computed``. ``hashes`` are those of its
        blocks up to there."""
        row = self._rows[owner]
        for position in [position for position in row.named if position <= num_computed]:
            slot, block_hash, is_passed = row.named.pop(position)
            if block_hash is None:
                block_hash = hashes[position // block_size - 1]
                self._remember(slot, block_hash)
            if self._settle(slot) and is_passed:
                row.passed.append(PassedSnapshot(position, slot, block_hash))

    def _settle(self, slot: int) -> bool:
        """Puts a slot that is no longer named into the cache; returns False if no hash finds it, so that it is
        blank."""
        is_found = self._hashes[slot] is not None
        if is_found:
            self._cached[slot] = None
        else:
            self._blanks.append(slot)
        return is_found

    def give_up_passed(self, owner: Hashable, end: int) -> None:
        """Frees the snapshots that a row has passed, before the last one up to position ``end``; keeps those from which
        others have begun."""
        passed = self._rows[owner].passed
        while len(passed) > 1 and passed[1].position <= end:
            _, slot, block_hash = passed.pop(0)
            if self._by_hash.get(block_hash) == slot and slot not in self._reused:
                self.drop(block_hash)

    def end_row(self, owner: Hashable) -> None:
        """Frees the slots of a row that the next plan drops. Its snapshots stay, if they can be found."""
        self.retract(owner)
        row = self._rows.pop(owner)
        self._blanks.append(row.live)
        for named in row.named.values():
            self._settle(named.slot)

    def drop(self, block_hash: bytes) -> None:
        """Drops the snapshot with this hash, if there is one."""
        slot = self._by_hash.get(block_hash)
        if slot is None:
            return
        self._forget(slot)
        if slot in self._cached:  # otherwise it is named
            del self._cached[slot]
            self._blanks.append(slot)

    def drop_all(self, but: Collection[bytes]) -> None:
        """Drops every snapshot, except those with the hashes ``but``."""
        for block_hash in [block_hash for block_hash in self._by_hash if block_hash not in but]:
            self.drop(block_hash)

    def complete_plan(self) -> None:
        """Ends the next plan: later ones may write to the slots from which its rows begin."""
        self._sources.clear()

    def announce(self, leader: Hashable, position: int, block_hash: bytes) -> None:
        """Has a running row save its state at ``position`` of its history, if there is a slot then. Others may wait for
        it."""
        self._rows[leader].wanted[position] = block_hash
        self._leaders.setdefault(block_hash, leader)

    def leader(self, block_hash: bytes) -> Hashable | None:
        """Returns the row that will save its state at the end of the block with this hash."""
        return self._leaders.get(block_hash)

    def retract(self, leader: Hashable) -> None:
        """Records that others must not wait for this row's states."""
        for block_hash in self._rows[leader].wanted.values():
            self._retract(leader, block_hash)

    def _retract(self, leader: Hashable, block_hash: bytes | None) -> None:
        if block_hash is not None and self._leaders.get(block_hash) is leader:
            del self._leaders[block_hash]

    def take_wanted(self, owner: Hashable, end: int) -> list[tuple[int, bool]]:
        """Removes and returns the positions up to ``end`` at which the next plan saves a row's state, in ascending
        order, and whether others want that."""
        wanted = self._rows[owner].wanted
        taken: list[tuple[int, bool]] = []
        for position in sorted(position for position in wanted if position <= end):
            block_hash = wanted.pop(position)
            self._retract(owner, block_hash)
            taken.append((position, block_hash is not None))
        return taken

    def check(self, found: Iterable[bytes]) -> None:
        """Asserts that each slot is in one state, and that all snapshots have hashes of blocks that are ``found``."""
        named = [each.slot for row in self._rows.values() for each in row.named.values()]
        live = [row.live for row in self._rows.values()]
        taken = [*self._blanks, *live, *named, *self._cached]
        assert sorted(taken) == list(range(self.num_slots)), "a slot is lost, or taken twice"
        with_hash = {slot: known for slot, known in enumerate(self._hashes) if known is not None}
        assert with_hash == {slot: known for known, slot in self._by_hash.items()}, "a hash finds another slot"
        assert with_hash.keys() >= self._cached.keys(), "a cached slot is not found by its hash"
        assert with_hash.keys().isdisjoint([*self._blanks, *live]), "a hash finds a slot without a snapshot"
        assert with_hash.keys() >= self._reused, "a slot without a snapshot counts as one that was used again"
        assert set(self._by_hash) <= set(found), "a snapshot has outlived its block"
        for block_hash, leader in self._leaders.items():
            assert block_hash in self._rows[leader].wanted.values(), "a state is awaited that no row will save"

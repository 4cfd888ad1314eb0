"""The second tier of the KV cache: which evicted blocks lie in host memory, and in which slot. Knows hashes and slot
numbers, never what a slot holds.

A slot keeps its block when that is copied back, so the device may have it as well: evicted again, it need not be copied
again. Such slots are the first to be overwritten, after blank ones; then those that were evicted the longest ago.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable


class HostTier:
    """The map from hash to slot. One without slots holds nothing."""

    def __init__(self, num_slots: int, on_overwritten: Callable[[bytes], None]) -> None:
        """``on_overwritten`` is told each hash that is found here no more because its slot was given to another."""
        self.num_slots = num_slots
        self._on_overwritten = on_overwritten
        # The first to be overwritten comes first.
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        # Those that the plan in the making copies back.
        self._restored: dict[bytes, int] = {}
        self._blanks: list[int] = []
        self.clear()

    def __len__(self) -> int:
        return len(self._slots) + len(self._restored)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots or block_hash in self._restored

    @property
    def hashes(self) -> Iterable[bytes]:
        """All that are found here."""
        return self._slots.keys() | self._restored.keys()

    def store(self, block_hash: bytes) -> int | None:
        """The slot that an evicted block is to be copied to; None if it is there already, or all slots are taken by
        what is being copied back."""
        if block_hash in self:
            if block_hash in self._slots:
                self._slots.move_to_end(block_hash)
            return None
        if self._blanks:
            slot = self._blanks.pop()
        elif self._slots:
            overwritten, slot = self._slots.popitem(last=False)
            self._on_overwritten(overwritten)
        else:
            return None
        self._slots[block_hash] = slot
        return slot

    def restore(self, block_hash: bytes) -> int:
        """The slot of a block that the plan in the making copies back: until ``settle`` it is not overwritten, since a
        plan copies out before it copies in."""
        slot = self._slots.pop(block_hash)
        self._restored[block_hash] = slot
        return slot

    def settle(self) -> None:
        """The plan is whole: the device has what it copies back."""
        for block_hash, slot in self._restored.items():
            self._slots[block_hash] = slot
            self._slots.move_to_end(block_hash, last=False)
        self._restored.clear()

    def clear(self) -> int:
        """Forgets everything; returns how many blocks."""
        num_forgotten = len(self)
        self._slots.clear()
        self._restored.clear()
        self._blanks = list(range(self.num_slots - 1, -1, -1))
        return num_forgotten

    def check(self) -> None:
        """Asserts that each slot is blank or holds one block."""
        taken = [*self._slots.values(), *self._restored.values(), *self._blanks]
        assert sorted(taken) == list(range(self.num_slots)), "a slot is lost, or taken twice"

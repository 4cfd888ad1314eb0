"""The second tier of the KV cache: tracks which evicted blocks are in host memory, and in which slots. It knows hashes
and slot numbers, never a slot's content.

A slot keeps its block when the block is copied back, so the block can be evicted again without another copy. Such slots
are overwritten first, after blank ones; then the slots whose blocks were evicted the longest ago.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable


class HostTier:
    """The map from hash to slot. A tier without slots holds nothing."""

    def __init__(self, num_slots: int, on_overwritten: Callable[[bytes], None]) -> None:
        """``on_overwritten`` is called with each hash that is no longer found here because its slot was given to
        another block."""
        self.num_slots = num_slots
        self._on_overwritten = on_overwritten
        # The first to be overwritten comes first.
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        # The blocks that the next plan copies back.
        self._restored: dict[bytes, int] = {}
        self._blanks: list[int] = []
        self.clear()

    def __len__(self) -> int:
        return len(self._slots) + len(self._restored)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots or block_hash in self._restored

    @property
    def hashes(self) -> Iterable[bytes]:
        return self._slots.keys() | self._restored.keys()

    def store(self, block_hash: bytes) -> int | None:
        """Returns the slot to copy an evicted block to; None if the block is here already, or if all slots hold blocks
        that are being copied back."""
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
        """Returns the slot of a block that the next plan copies back. The slot is not overwritten until ``settle``,
        because a plan copies out before it copies in."""
        slot = self._slots.pop(block_hash)
        self._restored[block_hash] = slot
        return slot

    def settle(self) -> None:
        """Ends the next plan's copies: the device has the blocks that it copies back."""
        for block_hash, slot in self._restored.items():
            self._slots[block_hash] = slot
            self._slots.move_to_end(block_hash, last=False)
        self._restored.clear()

    def clear(self) -> int:
        """Drops every block; returns their number."""
        num_forgotten = len(self)
        self._slots.clear()
        self._restored.clear()
        self._blanks = list(range(self.num_slots - 1, -1, -1))
        return num_forgotten

    def check(self) -> None:
        """Asserts that each slot is blank or holds one block."""
        taken = [*self._slots.values(), *self._restored.values(), *self._blanks]
        assert sorted(taken) == list(range(self.num_slots)), "a slot is lost, or taken twice"

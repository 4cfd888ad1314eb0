"""LoRA adapters, and which of them are in the worker's slots. Knows neither files nor processes."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter. Requests hold this object, so one that was unloaded, or was replaced by another one of the same name,
    remains until their rows have ended."""

    name: str
    path: str
    digest: bytes = b""
    """A sha256 of its files, which is part of the hashes of its blocks."""
    rank: int = 0
    slot: int = 0
    """The slot that holds it, or that it is being loaded into; 0: none."""
    is_loading: bool = False
    num_rows: int = 0
    """Rows that are computed with it."""
    last_step: int = -1
    """The newest step with a row of it that has ended."""

    def end_row(self, step: int) -> None:
        """Ends a row. ``step`` is the newest one with the row, which may be in flight."""
        self.num_rows -= 1
        self.last_step = max(self.last_step, step)


class AdapterSlots:
    """Assigns the worker's slots. If none is free, the least recently used adapter without rows gives its slot up."""

    def __init__(self, num_slots: int) -> None:
        self._holders: list[Adapter | None] = [None] * num_slots
        self._leaving: Adapter | None = None
        """With all slots in use, no row begins with this adapter, so that another one gets its slot."""
        self.answered = -1
        """The newest step with a result. Rows of later steps may still be computed."""
        self.start_load: Callable[[Adapter, int], None] = lambda adapter, slot: None
        """Called to load an adapter into a slot. ``end_load`` must follow, unless ``reset`` comes before."""

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def num_used(self) -> int:
        """The number of slots that hold an adapter, or that one is being loaded into."""
        return len(self._holders) - self._holders.count(None)

    def is_ready(self, adapter: Adapter) -> bool:
        """Returns whether a row may begin with the adapter. If not, it is loaded as soon as there is a slot for it."""
        if adapter is self._leaving and not adapter.num_rows:
            self._leaving = None  # the request that needed its slot did not take it
        if adapter.slot:
            return not adapter.is_loading and adapter is not self._leaving
        if (slot := self._slot_for_another()) is None:
            return False
        self._place(adapter, slot)
        self.start_load(adapter, slot)
        return False

    def take_free(self, adapter: Adapter) -> int:
        """Gives the adapter a slot that is empty, which it must be loaded into; returns 0 if there is none."""
        if None not in self._holders:
            return 0
        self._place(adapter, self._holders.index(None) + 1)
        return adapter.slot

    def end_load(self, adapter: Adapter, slot: int, *, is_loaded: bool) -> None:
        """Ends the load of an adapter; the slot is empty again if it failed."""
        if not slot or self._holders[slot - 1] is not adapter:
            return
        adapter.is_loading, adapter.last_step = False, max(adapter.last_step, self.answered)
        if not is_loaded:
            adapter.slot, self._holders[slot - 1] = 0, None

    def retire(self, adapter: Adapter) -> None:
        """Empties the slot of an adapter, unless rows need it."""
        if adapter.slot and not adapter.is_loading and self._is_idle(adapter):
            self._holders[adapter.slot - 1] = None
            adapter.slot = 0

    def reset(self) -> None:
        """Empties all slots: the worker is gone."""
        for adapter in self._holders:
            if adapter is not None:
                adapter.slot, adapter.is_loading, adapter.num_rows, adapter.last_step = 0, False, 0, -1
        self._holders = [None] * len(self._holders)
        self._leaving, self.answered = None, -1

    def _place(self, adapter: Adapter, slot: int) -> None:
        holder = self._holders[slot - 1]
        if holder is not None:
            holder.slot = 0
        self._leaving = None
        self._holders[slot - 1], adapter.slot, adapter.is_loading = adapter, slot, True

    def _slot_for_another(self) -> int | None:
        """Returns a slot that is empty or can be emptied. Else makes the least recently used adapter leave its own."""
        if None in self._holders:
            return self._holders.index(None) + 1
        held = [adapter for adapter in self._holders if adapter is not None and not adapter.is_loading]
        idle = [adapter for adapter in held if self._is_idle(adapter)]
        if idle:
            return min(idle, key=lambda adapter: adapter.last_step).slot
        if self._leaving is None and held:
            self._leaving = min(held, key=lambda adapter: adapter.last_step)
        return None

    def _is_idle(self, adapter: Adapter) -> bool:
        return not adapter.num_rows and adapter.last_step <= self.answered

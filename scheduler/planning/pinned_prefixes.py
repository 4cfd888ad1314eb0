"""Blocks that sequences keep while they wait for a row. Forked sequences keep those of the prompt, and sequences with
an injection keep those that they have computed. Does not know rows."""

from collections.abc import Callable

from penstock.kv.manager import KVCacheManager
from penstock.kv.window_blocks import WindowTable
from penstock.scheduler.planning.sequence import SequenceState


class PinnedPrefixes:
    """The waiting sequences that keep blocks."""

    def __init__(self, kv: KVCacheManager, on_taken: Callable[[SequenceState], None]) -> None:
        """``on_taken`` is called with each sequence that loses its blocks and continues to wait."""
        self._kv = kv
        self._on_taken = on_taken
        self._sequences: list[SequenceState] = []

    def add_sequence(self, sequence: SequenceState, row: SequenceState, num_blocks: int) -> None:
        """Adds a sequence that begins to wait, and keeps the first blocks of a row: none if the row has given up what
        windowed groups need of them."""
        window = self._kv.windows.part(row.window, num_blocks)
        if window is not None and num_blocks:
            sequence.pinned, sequence.pinned_window = row.block_ids[:num_blocks], window
            self._kv.pool.share([*sequence.pinned, *sequence.pinned_window.block_ids])
            self._sequences.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Removes a sequence that no longer waits. Does nothing if it keeps no blocks."""
        if sequence.pinned:
            self._kv.release(sequence.pinned, sequence.pinned_window)
            sequence.pinned, sequence.pinned_window = [], WindowTable()
            self._sequences.remove(sequence)

    def remove_all(self, but: SequenceState | None = None) -> bool:
        """Releases the blocks of all waiting sequences, which find them cached later or compute them; returns False if
        there are none."""
        victims = [sequence for sequence in self._sequences if sequence is not but]
        for victim in victims:
            self.take(victim)
        return bool(victims)

    def take(self, sequence: SequenceState) -> None:
        """Releases the blocks of a sequence that continues to wait. Does nothing if it keeps none."""
        if sequence.pinned:
            self.remove(sequence)
            self._on_taken(sequence)

    def drop_sequences(self) -> None:
        """Forgets all sequences, because their blocks are gone."""
        self._sequences.clear()

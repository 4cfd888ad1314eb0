"""Blocks of the prompt that forked choices keep while they wait for a row. Knows no rows."""

from collections.abc import Callable

from penstock.kv.manager import KVCacheManager
from penstock.scheduler.planning.sequence import SequenceState


class PinnedPrefixes:
    """Who keeps blocks."""

    def __init__(self, kv: KVCacheManager, on_taken: Callable[[SequenceState], None]) -> None:
        """``on_taken`` is called with each choice that waits on without its blocks."""
        self._kv = kv
        self._on_taken = on_taken
        self._sequences: list[SequenceState] = []

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def add_sequence(self, sequence: SequenceState) -> None:
        """A forked choice waits, with the blocks that it shares with the first one."""
        if sequence.pinned:
            self._kv.share(sequence.pinned)
            self._sequences.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """It waits no longer; nothing if it keeps no blocks."""
        if sequence.pinned:
            self._kv.free(sequence.pinned)
            sequence.pinned = []
            self._sequences.remove(sequence)

    def remove_all(self, but: SequenceState | None = None) -> bool:
        """Those that wait give up their blocks, to find them cached or compute them; False if none has any."""
        victims = [choice for choice in self._sequences if choice is not but]
        for choice in victims:
            self.remove(choice)
            self._on_taken(choice)
        return bool(victims)

    def drop_sequences(self) -> None:
        """The blocks are gone, whoever kept them."""
        self._sequences.clear()

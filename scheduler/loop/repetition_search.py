"""Looks for repetition in the texts of decoding sequences. Only those whose text repeats itself have drafts.

All other sequences are planned and computed as without speculation. The search takes a small share of the time of
steps, however many sequences there are.
"""

from penstock.scheduler.planning.queues import RunningQueue
from penstock.scheduler.planning.sequence import SequenceState
from penstock.scheduler.repetition import Repetition

SHARE = 0.001
"""The share of the time of steps that the search may take."""
MAX_SAVED_S = 0.001
"""The most time that is saved up for later steps."""
VISIT_S = 5e-7
"""The assumed time for a sequence that is not searched."""
MANY = 4
"""From this many decoding sequences on, a repetition must be longer."""


class RepetitionSearch:
    """Searches the decoding sequences in turn."""

    def __init__(self, running: RunningQueue) -> None:
        self._running = running
        self._saved_s = 0.0
        """The seconds that the search may take now."""
        self._at = 0

    @staticmethod
    def add_sequence(sequence: SequenceState) -> None:
        """Makes the drafts of a new sequence depend on its text."""
        if sequence.max_drafts:
            sequence.repetition = Repetition()
            sequence.set_max_drafts()

    def look(self, step_s: float) -> None:
        """Searches as many sequences as a step of this time pays for."""
        self._saved_s = min(self._saved_s + SHARE * step_s, MAX_SAVED_S)
        decoding = self._running.decoding
        is_crowded = len(decoding) >= MANY
        for _ in range(len(decoding)):
            if self._saved_s <= 0.0:
                return
            self._at = (self._at + 1) % len(decoding)
            self._saved_s -= VISIT_S
            sequence = decoding[self._at]
            repetition = sequence.repetition
            if repetition is None or repetition.is_found or len(sequence.token_ids) < repetition.next_look:
                continue
            self._saved_s -= repetition.look(sequence.token_ids, is_crowded=is_crowded)
            if repetition.is_found:
                sequence.set_max_drafts()

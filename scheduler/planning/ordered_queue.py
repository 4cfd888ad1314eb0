"""A sorted queue of waiting sequences that returns the work of its first sequences without reading each of them."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from penstock.scheduler.planning.sequence import SequenceState
from penstock.scheduler.timing.queued_work import NO_WORK, QueuedWork, total_work

_PART = 64
"""Sequences per part of a queue, at most twice as many. Their work is summed per part."""


class OrderedQueue:
    """Sequences in the order of a key, which is unique and must not change while they are here."""

    def __init__(self, key: Callable[[SequenceState], Any], sequences: Iterable[SequenceState] = ()) -> None:
        self._key = key
        ordered = sorted(sequences, key=key)
        self._parts = [ordered[start : start + _PART] for start in range(0, len(ordered), _PART)]
        self._works = [total_work(sequence.work for sequence in part) for part in self._parts]
        self._num_sequences = len(ordered)
        self.work = total_work(self._works)
        """The work of all sequences."""

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[SequenceState]:
        return chain.from_iterable(self._parts)

    def snapshot(self) -> Iterator[SequenceState]:
        """Iterates over the sequences that are here now, unaffected by later changes."""
        return chain.from_iterable([tuple(part) for part in self._parts])

    @property
    def first(self) -> SequenceState:
        """The first sequence; the queue must not be empty."""
        return self._parts[0][0]

    def insert(self, sequence: SequenceState) -> None:
        index = min(self._part_of(self._key(sequence)), len(self._parts) - 1)
        if index < 0:
            self._parts.append([])
            self._works.append(NO_WORK)
            index = 0
        part = self._parts[index]
        insort(part, sequence, key=self._key)
        self._num_sequences += 1
        self._add(index, sequence.work)
        if len(part) > 2 * _PART:
            halves = [part[:_PART], part[_PART:]]
            self._parts[index : index + 1] = halves
            self._works[index : index + 1] = [total_work(sequence.work for sequence in half) for half in halves]

    def remove(self, sequence: SequenceState) -> None:
        value = self._key(sequence)
        index = self._part_of(value)
        part = self._parts[index]
        place = bisect_left(part, value, key=self._key)
        assert part[place] is sequence
        del part[place]
        self._num_sequences -= 1
        if part:
            self._add(index, NO_WORK.minus(sequence.work))
        else:
            del self._parts[index], self._works[index]
            self.work = self.work.minus(sequence.work) if self._parts else NO_WORK

    def change_work(self, sequence: SequenceState, change: QueuedWork) -> None:
        self._add(self._part_of(self._key(sequence)), change)

    def num_before(self, value: Any) -> int:
        """Returns how many sequences have a lower key."""
        index = self._part_of(value)
        if index == len(self._parts):
            return self._num_sequences
        return sum(map(len, self._parts[:index])) + bisect_left(self._parts[index], value, key=self._key)

    def work_of_first(self, num_sequences: int) -> QueuedWork:
        if num_sequences >= self._num_sequences:
            return self.work
        work = NO_WORK
        for part, part_work in zip(self._parts, self._works, strict=True):
            if num_sequences < len(part):
                return work.plus(total_work(sequence.work for sequence in part[:num_sequences]))
            work = work.plus(part_work)
            num_sequences -= len(part)
        return work

    def _part_of(self, value: Any) -> int:
        """Returns the index of the part that a key belongs to; the number of parts, if it comes after all."""
        return bisect_left(self._parts, value, key=lambda part: self._key(part[-1]))

    def _add(self, index: int, work: QueuedWork) -> None:
        self._works[index] = self._works[index].plus(work)
        self.work = self.work.plus(work)

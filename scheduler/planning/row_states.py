"""Decides which saved state a row begins with, and at which positions its own is saved. It does not plan chunks. For a
model without recurrent layers it does nothing.

A row begins after the longest cached prefix that ends with a saved state. Its own state is saved

- at the last block border of its prompt, where other choices of its request and retries begin;
- at the end of what it shares with the cache, or with sequences that wait for it, so that they can begin there;
- at each block border that it passes after its known history. Once a border is confirmed, the one before it is given
  up. So a sequence that ends leaves a state that is at most one block old.

Rows that begin get slots before all of these. A state that finds no slot is not saved.
"""

import sys
from collections.abc import Iterable, Sequence

from penstock.kv.manager import KVCacheManager
from penstock.scheduler.engine_stats import Counters
from penstock.scheduler.plan import NO_SLOT, StateSnapshot, StepPlan
from penstock.scheduler.planning.sequence import SequenceState, SequenceStatus


class RowStates:
    """Requests slots from the state pool of the KV manager, on behalf of rows."""

    def __init__(self, kv: KVCacheManager, counters: Counters) -> None:
        self._kv = kv
        self._pool = kv.states
        self._counters = counters

    @property
    def has_room(self) -> bool:
        """Whether there is a slot for another row, if it needs one."""
        return not self._pool.num_slots or self._pool.has_free

    @property
    def pins_blocks(self) -> bool:
        """Whether a waiting sequence may keep its blocks. With recurrent layers they may be useless once it begins,
        because the state after them may be gone. So it finds them cached, or not."""
        return not self._pool.num_slots

    def last_coming(self, sequence: SequenceState, num_found: int) -> bytes | None:
        """Returns the last of the first ``num_found`` blocks, all of which have KV, at whose end a running row will
        save its state; None if there is none after the last saved state."""
        if self._pool.num_slots:
            for block_hash in reversed(sequence.hashes[:num_found]):
                if self._pool.find(block_hash) is not None:
                    return None
                if self._pool.leader(block_hash) is not None:
                    return block_hash
        return None

    def request(self, leader: SequenceState, waiting: SequenceState, block_hash: bytes) -> None:
        """Has a row that computes a block for a waiting sequence save its state there."""
        if self._pool.num_slots and self._pool.leader(block_hash) is None:
            position = (waiting.hashes.index(block_hash) + 1) * self._kv.block_size
            self._pool.announce(leader, position, block_hash)

    def start_row(self, sequence: SequenceState, num_cached: int, num_found: int) -> tuple[int, int]:
        """Returns the slots of ``AddedRow`` for a row that is about to begin after ``num_cached`` blocks. As many as
        ``num_found`` have KV."""
        pool, size, counters = self._pool, self._kv.block_size, self._counters
        if not pool.num_slots:
            return NO_SLOT, NO_SLOT
        hashes, num_tokens = sequence.hashes, len(sequence.token_ids)
        slot, source = pool.start_row(sequence, hashes[num_cached - 1] if num_cached else None)
        counters.state_hits += num_cached > 0
        counters.state_misses += num_found > num_cached
        counters.state_missed_tokens += (num_found - num_cached) * size
        row = pool.row(sequence)
        if self._kv.caches_prefixes:
            row.next_border = -(-num_tokens // size) * size
            if not sequence.is_pooled:
                for length in (sequence.num_prompt_tokens, num_tokens):
                    if (position := self._last_border(length)) > num_cached * size:
                        row.wanted[position] = None
            if sequence.is_new and num_found > num_cached:
                pool.announce(sequence, num_found * size, hashes[num_found - 1])
        else:
            row.next_border = sys.maxsize  # no hash would find it
        return slot, NO_SLOT if source is None else source

    def _last_border(self, num_tokens: int) -> int:
        """Returns the last block border in a history of this length at which a sequence with the same history may
        begin: one token is left to compute."""
        return (num_tokens - 1) // self._kv.block_size * self._kv.block_size

    def save(self, plan: StepPlan, chunked: Sequence[SequenceState], decoding: Iterable[SequenceState]) -> None:
        """Completes a plan: names slots for the states at positions that its chunks compute, and that its decoding rows
        may reach. ``chunked``: the rows of the chunks, in their order."""
        pool = self._pool
        if not pool.num_slots:
            return
        if self._kv.caches_prefixes:
            for chunk, sequence in zip(plan.chunks, chunked, strict=True):
                # If its grammar's mask is late, the last token of its history is computed again by a later plan.
                self._save_known(plan, sequence, chunk.start, min(chunk.end, sequence.prefill_end - 1))
        for sequence in (*chunked, *decoding):
            if sequence.state is SequenceStatus.DECODING:
                self._save_borders(plan, sequence)
        pool.complete_plan()

    def _save_known(self, plan: StepPlan, sequence: SequenceState, start: int, end: int) -> None:
        """Names slots for positions of a known history, above ``start`` and up to ``end``."""
        pool, size, hashes = self._pool, self._kv.block_size, sequence.hashes
        for num_blocks in self._kv.wanted.partings(hashes, start // size, end // size):
            pool.announce(sequence, num_blocks * size, hashes[num_blocks - 1])
        prompt_end = self._last_border(sequence.num_prompt_tokens)
        for position, is_awaited in pool.take_wanted(sequence, end):
            is_passed = position > prompt_end and not is_awaited
            slot = pool.name_slot(sequence, position, hashes[position // size - 1], is_passed=is_passed)
            self._add(plan, sequence, position, slot)

    def _save_borders(self, plan: StepPlan, sequence: SequenceState) -> None:
        """Names a slot for each block border that the plans up to this one may reach."""
        row = self._pool.row(sequence)
        while row.next_border < sequence.length_bound:
            position, row.next_border = row.next_border, row.next_border + self._kv.block_size
            self._add(plan, sequence, position, self._pool.name_slot(sequence, position, None, is_passed=True))

    @staticmethod
    def _add(plan: StepPlan, sequence: SequenceState, position: int, slot: int | None) -> None:
        if slot is not None:
            plan.snapshots.append(StateSnapshot(sequence.row, position, slot))

    def confirm(self, sequence: SequenceState) -> None:
        """Applies a result: the states up to ``num_computed`` are saved, and their blocks published."""
        pool = self._pool
        row = pool.row(sequence)
        if row.named:
            pool.confirm(sequence, sequence.num_computed, sequence.hashes, self._kv.block_size)
        if row.wanted:
            pool.take_wanted(sequence, sequence.num_computed)

    def give_up_passed(self, sequence: SequenceState) -> None:
        """Gives up the states at borders that a row has passed, before the last one in the text that its caller has. A
        stop string may still take away what follows."""
        if len(self._pool.row(sequence).passed) > 1:
            self._pool.give_up_passed(sequence, sequence.num_input_tokens + sequence.output.num_in_text)

    def retract(self, sequence: SequenceState) -> None:
        """Lets no sequence wait for the states of a row that is held."""
        if self._pool.num_slots:
            self._pool.retract(sequence)

    def end_row(self, sequence: SequenceState) -> None:
        """Frees the slots of a row that leaves."""
        if self._pool.num_slots:
            self.give_up_passed(sequence)
            self._pool.end_row(sequence)

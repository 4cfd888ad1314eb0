"""The CPU library's sampler, applied to one row at a time. Guards show whether it writes outside its buffers."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from penstock.kernels.cpu.bindings import SampledToken, SamplingRow
from penstock.models.backends.cpu.sampling import SamplingRows
from penstock.models.batch.grammar_matcher import Words
from penstock.models.batch.rows import RowTable
from penstock.models.batch.sampled_positions import GrammarBitmasks, SampledPosition
from penstock.scheduler.plan import AddedRow, StepPlan

GUARD = 64
POISON = 0xA7


def make_row(sampling, history=(1, 2, 3), num_prompt=None):
    rows = RowTable(num_blocks=1, block_size=1 << 20, hidden_size=8)
    rows.apply(
        StepPlan(0, [], [AddedRow(0, 0, list(history), num_prompt or len(history), 0, [0], sampling)], [], [], [])
    )
    return rows[0]


class Guarded:
    """A buffer full of garbage, aligned to 64 bytes, between guards that must not change."""

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes
        self._all = np.full(num_bytes + 3 * GUARD, POISON, dtype=np.uint8)
        self._start = GUARD + -(self._all.ctypes.data + GUARD) % 64
        self.address = self._all.ctypes.data + self._start

    def read(self, dtype):
        """Checks the guards and returns the buffer as an array of this type."""
        end = self._start + self.num_bytes
        assert (self._all[: self._start] == POISON).all()
        assert (self._all[end:] == POISON).all()
        return self._all[self._start : end].view(dtype)

    def write(self, values):
        self.read(values.dtype)[: len(values)] = values


class Sampler:
    """The kernel for logits of one size."""

    def __init__(self, table, vocab_size):
        self._table = table
        self._vocab_size = vocab_size
        self._rows = SamplingRows()
        self._logits = Guarded(4 * vocab_size)
        self._scratch = Guarded(table.sampling_scratch(vocab_size))

    def sample(self, logits, row, mask=None):
        """Returns the token, its log-probability, the ids of the likeliest tokens and their log-probabilities."""
        batch = self._rows.gather([SampledPosition(row)])
        if mask is not None:
            batch.mask([0], mask[None])
        ids, top, out = Guarded(4 * batch.num_top), Guarded(4 * batch.num_top), SampledToken()
        self._logits.write(logits)
        line = SamplingRow.from_address(batch.address)
        self._table.sample(
            self._logits.address, self._vocab_size, line, self._scratch.address, out, ids.address, top.address
        )
        self._logits.read(np.float32)
        self._scratch.read(np.uint8)
        return out.token_id, out.logprob, ids.read(np.int32)[: out.num_top], top.read(np.float32)[: out.num_top]


def masks_of(masks: Sequence[Words]) -> GrammarBitmasks:
    """Returns bitmasks for the first rows of a batch."""
    words: Future[Words] = Future()
    words.set_result(np.stack(masks))
    return GrammarBitmasks(list(range(len(masks))), words)

"""The CPU library's sampling parameters: a table of ``SamplingRow``, from which each step copies its rows."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu.bindings import SamplingRow, address
from penstock.models.batch.rows import Row, TokenLists
from penstock.models.batch.sampled_positions import SampledPosition
from penstock.models.batch.token_counts import TokenCounts

Words = NDArray[np.uint64]


class SamplingBatch(NamedTuple):
    """The sampled positions of a step. Arrays that they point into live as long as the batch."""

    address: int
    """The address of the first ``SamplingRow``."""
    num_top: int
    """The largest number of likeliest tokens that any row reports; sizes a row's results."""
    rows: Words
    """(sampled positions, WIDTH): the memory at the address."""
    kept: tuple[object, ...]
    """Keeps what the rows point to alive."""

    def mask(self, sampled: list[int], masks: NDArray[np.uint32]) -> None:
        """Replaces the masks of some rows by those of grammars, which must live as long as the batch is used."""
        assert masks.flags.c_contiguous, "masks are contiguous"
        self.rows[sampled, MASK] = address(masks) + np.arange(len(sampled)) * masks.strides[0]


def _column(name: str) -> int:
    """Returns a field's column. Every field has 8 bytes, so a row is a line of 64-bit words."""
    return int(getattr(SamplingRow, name).offset) // 8


WIDTH = ctypes.sizeof(SamplingRow) // 8
POSITION = _column("position")
SEEN = (_column("seen_ids"), _column("seen_counts"), _column("num_seen"))
FORBIDDEN = (_column("forbidden"), _column("num_forbidden"))
MASK = _column("mask")
NUM_LOGPROBS = _column("num_logprobs")


class _Counts:
    """The addresses of a row's counts. They change only when the counts outgrow their arrays."""

    __slots__ = ("_arrays", "_counts", "_place")

    def __init__(self, counts: TokenCounts) -> None:
        self._counts = counts
        self._arrays: tuple[object, object] | None = None
        self._place = (0, 0)

    def locate(self) -> tuple[tuple[int, int, int], object]:
        """Returns the values of SEEN, and the object that must live as long as they are used."""
        ids = self._counts.ids
        if self._arrays is None or ids.base is not self._arrays[0]:
            output = self._counts.output
            self._arrays, self._place = (ids.base, output.base), (address(ids), address(output))
        return (*self._place, len(ids)), self._arrays


class SamplingRows:
    """Builds batches of rows.

    A row is filled in when it is first seen, and replaces an earlier one of the same number. Each step writes only what
    changes: positions, the addresses of penalties' counts, and forbidden tokens.
    """

    def __init__(self) -> None:
        self._table: Words = np.zeros((16, WIDTH), dtype=np.uint64)
        self._lists: list[TokenLists | None] = [None] * 16
        """The lists of the row that each line of the table was filled from, and that it points into."""
        self._counts: dict[int, _Counts] = {}
        self._restrained: set[int] = set()
        """Rows that may have forbidden tokens."""

    def gather(self, sampled: list[SampledPosition]) -> SamplingBatch:
        """Returns the current rows of the sampled positions. Valid until a token is appended to one of them."""
        numbers = [sample.row.number for sample in sampled]
        self._grow(max(numbers, default=0) + 1)
        known = self._lists
        for sample, number in zip(sampled, numbers, strict=True):
            if known[number] is not sample.row.lists:
                self._fill(sample.row)
        # A copy: the table would be overwritten while another thread still reads the last batch.
        words = self._table[numbers]
        words[:, POSITION] = [sample.position for sample in sampled]
        kept: list[object] = [[known[number] for number in numbers]]
        if self._counts:
            self._point_to_counts(words, sampled, kept)
        if self._restrained:
            self._point_to_forbidden(words, sampled, kept)
        num_top = int(words[:, NUM_LOGPROBS].view(np.int64).max(initial=0))
        return SamplingBatch(address(words), num_top, words, tuple(kept))

    def _point_to_counts(self, words: Words, sampled: list[SampledPosition], kept: list[object]) -> None:
        known = self._counts
        penalised = [
            (index, _Counts(counts) if sample.drafts and (counts := sample.counts) else known[sample.row.number])
            for index, sample in enumerate(sampled)
            if sample.row.number in known
        ]
        if penalised:
            located = [counts.locate() for _, counts in penalised]
            kept += [arrays for _, arrays in located]
            _write(words, SEEN, [index for index, _ in penalised], [values for values, _ in located])

    def _point_to_forbidden(self, words: Words, sampled: list[SampledPosition], kept: list[object]) -> None:
        restrained = [
            (index, ids[0] if len(ids) == 1 else np.concatenate(ids))
            for index, sample in enumerate(sampled)
            if sample.row.number in self._restrained and (ids := tuple(sample.forbidden_ids()))
        ]
        if restrained:
            arrays = [ids for _, ids in restrained]
            kept += arrays
            _write(words, FORBIDDEN, [index for index, _ in restrained], [(address(ids), len(ids)) for ids in arrays])

    def _fill(self, row: Row) -> None:
        sampling, lists, number = row.sampling, row.lists, row.number
        entry = SamplingRow(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            top_k=sampling.top_k,
            num_logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
            bias_ids=address(lists.bias_ids),
            biases=address(lists.bias),
            num_biases=len(lists.bias),
        )
        if lists.allowed is not None:
            entry.allowed, entry.num_allowed = address(lists.allowed), len(lists.allowed)
        self._table[number] = np.frombuffer(bytes(entry), dtype=np.uint64)
        self._lists[number] = lists
        self._counts.pop(number, None)
        if row.counts is not None:
            self._counts[number] = _Counts(row.counts)
        self._restrained.discard(number)
        if sampling.min_tokens > 0 or sampling.bad_words:
            self._restrained.add(number)

    def _grow(self, num_rows: int) -> None:
        have = len(self._table)
        if num_rows > have:
            grown = np.zeros((max(num_rows, 2 * have), WIDTH), dtype=np.uint64)
            grown[:have] = self._table
            self._table = grown
            self._lists += [None] * (len(grown) - have)


def _write(words: Words, columns: tuple[int, ...], at: list[int], values: Sequence[tuple[int, ...]]) -> None:
    """Writes ``values`` to the given columns of the rows ``at``."""
    words[np.array(at)[:, None], columns] = np.array(values, dtype=np.uint64)

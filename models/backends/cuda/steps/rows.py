"""The rows on the device, kept up to date with those of the plan. Changes between steps are copied in order, so that a
step that still runs sees the rows as they were when it started."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.cuda.model_shapes import ModelShape
from penstock.kernels.cuda.sampling.tensors import NUM_INTEGERS, NUM_NUMBERS, SamplerRows, integer_line, number_line
from penstock.kernels.cuda.step import DeviceRows
from penstock.models.backends.cuda.steps.bad_words import BadWordsPool
from penstock.models.backends.torch_common.device import copy_to
from penstock.models.batch.batch import Batch
from penstock.models.batch.rows import Row, RowTable
from penstock.scheduler.plan import num_row_numbers

Words = tuple[list[tuple[int, ...]], list[tuple[int, ...]]]
"""A row's stops, each as a word, and its bad words."""


class CudaRows:
    """Copies a row when it is first seen, and its new blocks when it gets some.

    Data that only some rows have (counts for penalties, biases, a mask of allowed tokens) is stored in *lines*. There
    are as many lines as rows that can run.
    """

    def __init__(self, model: ModelShape, device: torch.device) -> None:
        self._shape = shape = model.sampler()
        self._device = device
        num_rows, self._num_lines = num_row_numbers(model.max_sequences), model.max_sequences
        self.on_moved: Callable[[], None] = lambda: None
        """Called when tensors of ``sampler`` are replaced: their addresses change."""
        self._words = BadWordsPool(device)

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.rows = DeviceRows(
            tables=zeros(num_rows, model.max_pages) - 1,
            lengths=zeros(num_rows),
            next_tokens=zeros(num_rows),
            histories=zeros(num_rows, shape.max_history),
        )
        self.window_tables = zeros(model.num_window_groups, num_rows, model.max_pages)
        """(groups, R, N) int32: the pages of layers with a window, if these have pages of their own. Those before a
        row's window are not read."""
        self.masks = zeros(self._num_lines + model.max_sampled, shape.mask_words)
        """(lines + masks, ceil(V / 32)) int32: what rows allow, then what grammars allow in the newest step."""
        self.sampler = SamplerRows(
            numbers=zeros(num_rows, NUM_NUMBERS.value, dtype=torch.float64),
            integers=zeros(num_rows, NUM_INTEGERS.value, dtype=torch.int64),
            histories=self.rows.histories,
            counts=zeros(self._num_lines, shape.vocab_size),
            biases=zeros(self._num_lines, shape.vocab_size, dtype=torch.float32),
            word_starts=self._words.starts,
            word_tokens=self._words.tokens,
        )
        self._known: list[Row | None] = [None] * num_rows
        self._num_blocks = [0] * num_rows
        self._window_ends = [0] * num_rows
        self._free_lines = list(range(self._num_lines))
        self._lines: dict[Row, int] = {}

    def update(self, batch: Batch) -> None:
        """Updates the rows before a batch is computed; their state is the one that the batch starts from."""
        known, num_blocks = self._known, self._num_blocks
        added = [row for row in batch.rows if known[row.number] is not row]
        extended = [row for row in batch.rows if known[row.number] is row and row.num_blocks > num_blocks[row.number]]
        if len(self.window_tables):
            self._extend_windows(batch.rows, batch.table)  # reads which rows are new
        if added:
            self._add(added, batch.table)
        if extended:
            self._extend(extended, batch.table)

    def mask_lines(self, batch: Batch) -> list[int]:
        """Returns the index into ``masks`` for each of the batch's lines; -1 allows every token."""
        masks = [-1 if sample.row.lists.allowed is None else self._lines[sample.row] for sample in batch.sampled]
        if batch.masks is not None:
            for place, index in enumerate(batch.masks.sampled):
                masks[index] = self._num_lines + place
        return masks

    def write_masks(self, words: NDArray[np.uint32]) -> None:
        """Writes the tokens that grammars allow in the newest step: (masks, at least ceil(V / 32))."""
        assert words.shape[1] >= self._shape.mask_words, "a mask has a bit for every token"
        own = np.ascontiguousarray(words[:, : self._shape.mask_words]).view(np.int32)
        self.masks[self._num_lines :][: len(own)] = copy_to(self._device, own)

    def drop_rows(self, numbers: Collection[int]) -> None:
        """Forgets rows that sample no token in a step: the device advances them, so they must be copied again."""
        for number in numbers:
            self._known[number] = None

    def num_top(self, wanted: int) -> int:
        """Limits a number of likeliest tokens to the vocabulary."""
        return min(wanted, self._shape.vocab_size)

    def _add(self, added: list[Row], table: RowTable) -> None:
        for row in added:
            self._known[row.number] = row
            self._num_blocks[row.number] = row.num_blocks
        for row in added:
            self._take_line(row)
            if row.num_computed and any(len(word) > 1 for word in row.sampling.bad_words):
                # The device records the tokens that are computed from here on.
                history = copy_to(self._device, np.array(row.history[: row.num_computed], dtype=np.int32))
                self.sampler.histories[row.number, : len(history)] = history
        self._add_words(added)
        numbers = copy_to(self._device, [row.number for row in added])
        tables = np.full((len(added), self.rows.tables.shape[1]), -1, dtype=np.int32)
        for line, row in zip(tables, added, strict=True):
            line[: row.num_blocks] = table.blocks(row, 0)
        for column, values in (
            (self.rows.tables, tables),
            (self.rows.lengths, np.array([row.num_computed for row in added], dtype=np.int32)),
            (self.rows.next_tokens, np.full(len(added), -1, dtype=np.int32)),
            (self.sampler.numbers, np.array([_numbers(row) for row in added])),
        ):
            column.index_copy_(0, numbers, copy_to(self._device, values))

    def _extend(self, extended: list[Row], table: RowTable) -> None:
        parts = []
        for row in extended:
            begin = self._num_blocks[row.number]
            blocks = table.blocks(row, begin)
            parts.append(np.stack((np.full(len(blocks), row.number), np.arange(begin, row.num_blocks), blocks)))
            self._num_blocks[row.number] = row.num_blocks
        rows, places, blocks = copy_to(self._device, np.concatenate(parts, axis=1))
        self.rows.tables[rows, places] = blocks.int()

    def _extend_windows(self, rows: list[Row], table: RowTable) -> None:
        parts = []
        for row in rows:
            begin = self._window_ends[row.number] if self._known[row.number] is row else 0
            if begin < row.window_end:
                places = np.stack((np.full(row.window_end - begin, row.number), np.arange(begin, row.window_end)))
                parts.append(np.concatenate((places, table.window_blocks(row, begin))))
                self._window_ends[row.number] = row.window_end
        if parts:
            numbers, places, *of_groups = copy_to(self._device, np.concatenate(parts, axis=1))
            for pages, blocks in zip(self.window_tables, of_groups, strict=True):
                pages[numbers, places] = blocks.int()

    # Lines ------------------------------------------------------------------------------------------------------------

    def _take_line(self, row: Row) -> None:
        if row.counts is None and row.lists.allowed is None and not len(row.lists.bias):
            return
        if not self._free_lines and row not in self._lines:
            for gone in [known for known in self._lines if known.is_dropped]:
                self._free_lines.append(self._lines.pop(gone))
        line = self._lines[row] if row in self._lines else self._free_lines.pop()
        self._lines[row] = line
        if row.counts is not None:
            self._set(self.sampler.counts[line], row.counts.ids, 1 + row.counts.output)
        if len(row.lists.bias):
            self._set(self.sampler.biases[line], row.lists.bias_ids, row.lists.bias)
        if row.lists.allowed is not None:
            bits = np.zeros(32 * self._shape.mask_words, dtype=bool)
            bits[row.lists.allowed] = True
            words = np.packbits(bits, bitorder="little").view(np.int32)
            self.masks[line] = copy_to(self._device, words)

    def _set(self, line: Tensor, ids: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Sets a line to these values, and to 0 elsewhere."""
        inside = ids < self._shape.vocab_size  # a prompt may contain ids that the tokenizer lacks
        wanted = copy_to(self._device, values[inside]).to(line.dtype)
        line.zero_().index_copy_(0, copy_to(self._device, ids[inside]), wanted)

    def _add_words(self, added: Sequence[Row]) -> None:
        """Writes the integers of the added rows, which contain their words' places; of all rows if words moved."""
        wanted = [(row, _words(row)) for row in added]
        if not self._words.fits([word for _, (stops, bad) in wanted for word in stops + bad]):
            alive = [row for row in self._known if row is not None and not row.is_dropped]
            wanted = [(row, _words(row)) for row in alive]
            self._make_room([word for _, (stops, bad) in wanted for word in stops + bad])
        integers = []
        for row, (stops, bad) in wanted:
            first = self._words.add_words(stops + bad)
            integers.append(self._integers(row, (first, first + len(stops), first + len(stops) + len(bad))))
        numbers = copy_to(self._device, [row.number for row, _ in wanted])
        self.sampler.integers.index_copy_(0, numbers, copy_to(self._device, np.array(integers, dtype=np.int64)))

    def _make_room(self, words: list[tuple[int, ...]]) -> None:
        """Makes room for twice these words."""
        num_words, num_tokens = 2 * len(words), 2 * sum(map(len, words))
        pool = self._words
        if num_words < len(pool.starts) and num_tokens <= len(pool.tokens):
            pool.empty()
            return
        self._words = BadWordsPool(
            self._device, max(num_words, len(pool.starts) - 1), max(num_tokens, len(pool.tokens))
        )
        self.sampler = SamplerRows(
            **{**vars(self.sampler), "word_starts": self._words.starts, "word_tokens": self._words.tokens}
        )
        self.on_moved()

    def _integers(self, row: Row, words: tuple[int, int, int]) -> list[int]:
        sampling, line = row.sampling, self._lines.get(row, -1)
        return integer_line(
            sampling.seed,
            sampling.top_k if 0 < sampling.top_k < self._shape.vocab_size else 0,
            counts=-1 if row.counts is None else line,
            biases=line if len(row.lists.bias) else -1,
            free_from=row.num_prompt_tokens + sampling.min_tokens,
            words=words,
        )


def _numbers(row: Row) -> list[float]:
    p = row.sampling
    return number_line(p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)


def _words(row: Row) -> Words:
    stops: list[tuple[int, ...]] = (
        [(token_id,) for token_id in row.sampling.stop_token_ids] if row.sampling.min_tokens > 0 else []
    )
    return stops, list(row.sampling.bad_words)

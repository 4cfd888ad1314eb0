"""The recurrent states of rows on a GPU, in slots. A step advances them by the tokens that are certain, and once it has
sampled, by those that turned out to be kept. The host need not know how many these are."""

import math
from collections.abc import Collection, Iterator
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.cuda.recurrent.rows import LEAST_CHUNKED, RecurrentRows, RowChunks, chunk_lengths
from penstock.kernels.cuda.step import StepTensors
from penstock.models.architecture.recurrent import RecurrentMixer
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.cuda.steps.step_io import ALIGNMENT, ArrayLayout, Size, StepInputs
from penstock.models.backends.torch_common.weights import LayerState
from penstock.models.batch.batch import Batch
from penstock.models.batch.row_states import Save, StateCommit
from penstock.scheduler.plan import NO_SLOT

LEAST_CHUNK = 4
"""Tokens of a chunk on average, at least: states are saved at the ends of blocks of 16 tokens."""


def slot_floats(spec: ModelSpec) -> int:
    """Returns the numbers of a slot: the states of all layers."""
    return sum(size for mixer in spec.recurrent if mixer is not None for size in _sizes(mixer))


def _sizes(mixer: RecurrentMixer) -> Iterator[int]:
    """Yields the numbers that a slot has for a layer's last inputs and for its matrices, each rounded up so that the
    next begins where kernels can read."""
    count, rows, columns = mixer.matrices
    for size in (mixer.channels * (mixer.taps - 1), count * rows * columns):
        yield -(-size // ALIGNMENT) * ALIGNMENT


class CudaStates:
    """The slots of recurrent states; see ``RecurrentStates``. Copies are queued, in order with the steps."""

    def __init__(
        self, spec: ModelSpec, num_slots: int, max_sequences: int, max_tokens: int, device: torch.device
    ) -> None:
        self.stride = slot_floats(spec)
        """The numbers of a slot."""
        self._slots = torch.zeros(num_slots, self.stride, dtype=torch.float32, device=device)
        self.layers: dict[int, LayerState] = {}
        """Each layer's part: inputs (slots, taps - 1, channels) and matrices (slots, heads, K, V)."""
        begin = 0
        for layer, mixer in enumerate(spec.recurrent):
            if mixer is None:
                continue
            ends = list(accumulate(_sizes(mixer), initial=begin))
            parts = ((mixer.taps - 1, mixer.channels), mixer.matrices)
            self.layers[layer] = LayerState(*map(self._part, ends[:-1], parts))
            begin = ends[-1]
        # ``saves`` comes last, since the copy ends with the step's last token.
        of_sequences = {"slots": max_sequences, "certain": max_sequences, "first_chunks": max_sequences + 1}
        of_chunks = dict.fromkeys(("chunk_starts", "chunk_lengths"), max_tokens // LEAST_CHUNK)
        self._layout = ArrayLayout({**of_sequences, **of_chunks, "saves": max_tokens})
        self._array = torch.zeros(self._layout.size, dtype=torch.int32, device=device)
        self._parts = {name: self._array[part] for name, part in self._layout.parts.items()}

    def _part(self, begin: int, shape: tuple[int, ...]) -> Tensor:
        return torch.unflatten(self._slots[:, begin : begin + math.prod(shape)], 1, shape)

    @torch.inference_mode()
    def begin(self, slot: int, source: int) -> None:
        if source == NO_SLOT:
            self._slots[slot].zero_()
        else:
            self._slots[slot].copy_(self._slots[source])

    def commit(self, batch: Batch, commits: list[StateCommit]) -> None:
        """Does nothing: the step has done it; see ``kept_rows``."""

    def write(self, batch: Batch, size: Size) -> None:
        """Writes the rows of a batch that is computed as a step of that size."""
        end = self._layout.parts["saves"].start + size.tokens
        pinned = self._array.is_cuda
        host = torch.zeros(end, dtype=torch.int32, pin_memory=pinned)
        array: NDArray[np.int32] = host.numpy()
        for name, values in _values(batch, size.sequences):
            begin = self._layout.parts[name].start
            array[begin : begin + len(values)] = values
        self._array[:end].copy_(host, non_blocking=pinned)

    def drop_rows(self, batch: Batch, numbers: Collection[int]) -> None:
        """Keeps none of the tokens of these rows that are not certain, since they sample no token in this step."""
        for index, row in enumerate(batch.rows):
            if row.number in numbers:
                self._parts["certain"][index].fill_(int(batch.ends[index] - batch.starts[index]))

    def rows(self, size: Size, step: StepTensors) -> RecurrentRows:
        """Returns the rows of a step for its layers."""
        sequences = size.sequences
        return RecurrentRows(
            self._parts["slots"][:sequences],
            step.query_starts[:sequences],
            step.num_queries,
            self._parts["certain"][:sequences],
            self._parts["saves"][: size.tokens],
        )

    def chunks(self, size: Size) -> RowChunks:
        """Returns the chunks of a step's rows."""
        return RowChunks(
            self._parts["first_chunks"][: size.sequences + 1], self._parts["chunk_starts"], self._parts["chunk_lengths"]
        )

    def kept_rows(self, size: Size, inputs: StepInputs, kept: Tensor) -> RecurrentRows:
        """Returns the rows of a step as those of its sampled positions: for each row, the tokens that were not certain
        and are among the ``kept`` (B,) int32 that the row keeps."""
        sequences = size.sequences
        certain = self._parts["certain"][:sequences]
        # A row's sampled positions are after its last tokens, from ``kept_before`` on.
        starts = inputs.part("line_starts", sequences) + certain - inputs.part("kept_before", sequences)
        counts = (kept - certain).clamp_(min=0)
        saves = self._parts["saves"].index_select(0, inputs.part("line_tokens", size.sampled))
        return RecurrentRows(self._parts["slots"][:sequences], starts, counts, counts, saves)


def _values(batch: Batch, sequences: int) -> Iterator[tuple[str, "NDArray[np.int32] | list[int]"]]:
    """Yields the beginnings of the parts; the rest of each part is 0."""
    yield "slots", [step.slot for step in batch.states]
    yield "certain", [step.certain for step in batch.states]
    saves = np.zeros(len(batch.token_ids), dtype=np.int32)
    first_chunks, chunk_starts, lengths = [0], list[int](), list[int]()
    starts, firsts, ends = batch.starts.tolist(), batch.token_starts.tolist(), batch.ends.tolist()
    for row, step, start, first, end in zip(batch.rows, batch.states, starts, firsts, ends, strict=False):
        # Copies after 0 tokens or fewer are those that the step before makes, if it finds that the tokens are kept.
        assert row.state is not None
        later = [Save(position - start, slot) for position, slot in row.state.snapshots]
        for num_tokens, slot in (*step.saves, *(save for save in later if save.num_tokens > step.certain)):
            if 0 < num_tokens <= end - start:
                assert not saves[first + num_tokens - 1], "a position has one snapshot"
                saves[first + num_tokens - 1] = 1 + slot
        if step.certain >= LEAST_CHUNKED:
            cut = list(chunk_lengths(end - start, step.certain, (save.num_tokens for save in step.saves)))
            chunk_starts += list(accumulate(cut[:-1], initial=first))
            lengths += cut
        first_chunks.append(len(lengths))
    # Sequences that only pad a graph have no chunks.
    yield "first_chunks", first_chunks + [len(lengths)] * (sequences + 1 - len(first_chunks))
    yield "chunk_starts", chunk_starts
    yield "chunk_lengths", lengths
    yield "saves", saves

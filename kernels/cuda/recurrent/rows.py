"""The rows of a step whose recurrent states advance, and the chunks that their tokens are computed in."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.cuda.core.common import check

CHUNK = 64
"""The maximum number of tokens of a chunk."""
LEAST_CHUNKED = 32
"""Rows of fewer tokens are scanned token by token. Not measured: a chunk takes about as long as some tokens."""

ROW_ARGUMENTS = dict.fromkeys(("slots", "starts", "counts", "advancing", "saves"), torch.int32)
"""The arguments of kernels that get ``RecurrentRows``."""


class RecurrentRows(NamedTuple):
    """B rows and their tokens, which are some of a step's T. A row's first tokens advance the state in its slot; the
    others are computed from a copy of it."""

    slots: Tensor
    """(B,) int32: no slot is there twice, except for rows without tokens."""
    starts: Tensor
    """(B,) int32: the index in the step of each row's first token. Entries past the B-th are not read."""
    counts: Tensor
    """(B,) int32: the number of the row's tokens."""
    advancing: Tensor
    """(B,) int32: how many of them advance the state."""
    saves: Tensor
    """(T,) int32: 1 + the slot to which the row's state after the token is copied, if the token advances it; 0: it is
    not copied. It is the slot of no row."""

    def check_sizes(self, num_tokens: int) -> int:
        """Asserts the shapes and dtypes for a step of ``num_tokens``. Returns the number of rows."""
        (rows,) = self.slots.shape
        for tensor in (self.slots, self.starts, self.counts, self.advancing):
            check(tensor, (rows,), torch.int32)
        check(self.saves, (num_tokens,), torch.int32)
        return rows


class RowChunks(NamedTuple):
    """The chunks of those of B rows that are scanned in chunks; see ``chunk_lengths``."""

    firsts: Tensor
    """(B + 1,) int32: row b has the chunks from ``firsts[b]`` up to ``firsts[b + 1]``. A row without any is scanned
    token by token."""
    starts: Tensor
    """(C,) int32: the index in the step of each chunk's first token. Only the first ``firsts[B]`` entries are read."""
    lengths: Tensor
    """(C,) int32: the number of the chunk's tokens, up to ``CHUNK``."""

    def check_sizes(self, num_rows: int) -> None:
        """Asserts the shapes and dtypes."""
        check(self.firsts, (num_rows + 1,), torch.int32)
        check(self.starts, self.lengths.shape, torch.int32)
        check(self.lengths, self.starts.shape, torch.int32)


def chunk_lengths(count: int, advancing: int, saves: Iterable[int]) -> Iterator[int]:
    """Cuts a row's ``count`` tokens into chunks, and yields their lengths. A chunk ends wherever the row's state is
    copied or written: after ``advancing`` tokens, and after each number of tokens in ``saves`` up to that."""
    ends = {0, advancing, count, *(number for number in saves if 0 < number <= advancing)}
    for begin, end in pairwise(sorted(ends)):
        for first in range(begin, end, CHUNK):
            yield min(CHUNK, end - first)


def check_states(states: Tensor, stride: int) -> None:
    """Asserts that a layer's part of the states in all slots is (slots, ...) fp32, ``stride`` numbers apart."""
    assert states.dtype == torch.float32, states.dtype
    assert states.stride(0) == stride, (states.stride(), stride)
    assert states[0].is_contiguous(), states.stride()

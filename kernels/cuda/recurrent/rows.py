"""The rows of a step whose recurrent states advance."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.cuda.core.common import check

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


def check_states(states: Tensor, stride: int) -> None:
    """Asserts that a layer's part of the states in all slots is (slots, ...) fp32, ``stride`` numbers apart."""
    assert states.dtype == torch.float32, states.dtype
    assert states.stride(0) == stride, (states.stride(), stride)
    assert states[0].is_contiguous(), states.stride()

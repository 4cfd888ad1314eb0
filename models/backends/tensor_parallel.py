"""The ranks that share a model, each a worker process with its part of every matrix (tensor parallelism, Shoeybi et al.
2019, arXiv 1909.08053).

Queries, keys and values, and the gate and up of an MLP or an expert, are divided by their outputs, whole heads to a
rank; what follows each of them by its inputs. So each rank's output projection and down product give one summand of the
whole one's, and two sums over the ranks a layer are all that is said. The head is divided by the vocabulary; embedding,
norms and routers are whole on every rank, which costs memory and saves words.

All ranks run the same plans in the same order, and have the same hidden states and logits, bit for bit. So each of them
chooses the same tokens, and nobody needs to tell them. That costs one gathering of the logits a step, ``rows *
vocabulary`` numbers to every rank. And how tokens are chosen must depend on nothing but the inputs, in every bit.

Imports no tensor library: ``distributed`` calls it, and speaks with the other ranks.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class PeerLost(Exception):
    """A step cannot go on, since another rank has ended or can't be reached."""


class TensorParallel(Protocol):
    """One rank among those that share a model. Whatever a rank calls here all of them must call, in the same order: it
    waits for the slowest. Raises PeerLost."""

    rank: int
    """From 0 to ``size`` - 1."""
    size: int

    def all_reduce(self, x: "Tensor") -> None:
        """Makes ``x``, of any shape and contiguous, the sum of all ranks' ``x``, in place; every rank gets the same
        bits."""
        ...

    def gather_columns(self, x: "Tensor", num_columns: int) -> "Tensor":
        """``x`` (N, C) is the rank's ``share`` of the columns; returns (N, ``num_columns``), contiguous, the same
        to every rank."""
        ...

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        ...


class SingleRank:
    """The only rank: has the whole model, and nobody to speak with."""

    rank, size = 0, 1

    def all_reduce(self, x: "Tensor") -> None:
        """It is the sum already."""

    def gather_columns(self, x: "Tensor", num_columns: int) -> "Tensor":
        """They are all there."""
        assert x.shape[1] == num_columns
        return x

    def least(self, number: int) -> int:
        """The number."""
        return number


ALONE = SingleRank()


def share(total: int, parallel: TensorParallel) -> slice:
    """A rank's part of ``total`` rows or columns: the ranks' parts follow one another and are equal, but that the last
    ones are shorter, or empty, where the number of ranks does not divide ``total``."""
    each = -(-total // parallel.size)
    return slice(min(total, parallel.rank * each), min(total, (parallel.rank + 1) * each))

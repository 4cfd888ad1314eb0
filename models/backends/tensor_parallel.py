"""Tensor parallelism: the ranks that share a model, each a worker process with its part of every matrix (Shoeybi et al.
2019, arXiv 1909.08053).

Queries, keys and values, and the gate and up of an MLP or an expert, are divided by outputs, whole heads per rank; the
projection after each of them is divided by inputs. Each rank's output projection and down product are one summand of
the whole result, so the ranks exchange only two sums per layer. The head is divided by the vocabulary. Embedding, norms
and routers are whole on every rank, which costs memory and saves communication.

All ranks run the same plans in the same order, and have the same hidden states and logits, bit for bit. So each rank
chooses the same tokens without exchanging them. This costs one gather of the logits per step, ``rows * vocabulary``
numbers to every rank. The choice of tokens must depend only on the inputs, in every bit.

Imports no tensor library: ``distributed`` implements this protocol and communicates with the other ranks.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class PeerLost(Exception):
    """A step cannot continue, since another rank has ended or cannot be reached."""


class TensorParallel(Protocol):
    """One of the ranks that share a model. All ranks must make the same calls in the same order; each call waits for
    the slowest. Raises PeerLost."""

    rank: int
    """A number from 0 to ``size`` - 1."""
    size: int

    def all_reduce(self, x: "Tensor") -> None:
        """Replaces ``x``, contiguous, in place by the sum of all ranks' ``x``; every rank gets the same bits."""

    def gather_columns(self, x: "Tensor", num_columns: int) -> "Tensor":
        """``x`` (N, C) is the rank's ``share`` of columns. Returns (N, ``num_columns``), the same on every rank."""

    def least(self, number: int) -> int:
        """Returns the least of all ranks' numbers."""


class SingleRank:
    """The only rank: it has the whole model."""

    rank, size = 0, 1

    def all_reduce(self, x: "Tensor") -> None:
        """Leaves ``x`` as it is: it is the sum already."""

    def gather_columns(self, x: "Tensor", num_columns: int) -> "Tensor":
        assert x.shape[1] == num_columns
        return x

    def least(self, number: int) -> int:
        return number


ALONE = SingleRank()


def share(total: int, parallel: TensorParallel) -> slice:
    """Returns a rank's part of ``total`` rows or columns. The ranks' parts are contiguous and equal, except that the
    last ones are shorter or empty if the number of ranks does not divide ``total``."""
    each = -(-total // parallel.size)
    return slice(min(total, parallel.rank * each), min(total, (parallel.rank + 1) * each))

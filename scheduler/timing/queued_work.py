"""The amount of work before a request: sums over queued sequences."""

from collections.abc import Iterable
from operator import add
from typing import NamedTuple


class QueuedWork(NamedTuple):
    """The work of waiting sequences before they can decode; sums, if there are several."""

    rows: float = 0
    """Sequences that will decode, including forks that do not exist yet."""
    pooled: float = 0
    """Sequences that are embedded: they need a row only until their prompt is computed."""
    tokens: float = 0
    """Tokens of histories that are neither cached nor computed for an earlier sequence."""
    kv: float = 0
    """The number of tokens that each of these attends to, summed."""
    context: float = 0
    """The lengths of the histories of the ``rows``, summed."""
    pooled_context: float = 0
    """The lengths of the histories of the ``pooled``, summed."""
    evicted_blocks: float = 0
    """Blocks to copy back from the host tier."""
    new_blocks: float = 0
    """Blocks of histories, except those that are shared with a running or an earlier sequence."""

    @property
    def chunks(self) -> float:
        """The number of chunks of histories, if none is split."""
        return self.rows + self.pooled

    @property
    def length(self) -> float:
        return (self.context + self.pooled_context) / max(1, self.chunks)

    def plus(self, other: "QueuedWork") -> "QueuedWork":
        return QueuedWork(*map(add, self, other))

    def minus(self, other: "QueuedWork") -> "QueuedWork":
        return QueuedWork(*[mine - its for mine, its in zip(self, other, strict=True)])


NO_WORK = QueuedWork()


def total_work(works: Iterable[QueuedWork]) -> QueuedWork:
    """Returns the sum."""
    columns = list(zip(*works, strict=True))
    return QueuedWork(*map(sum, columns)) if columns else NO_WORK


def sequence_work(
    num_tokens: int,
    num_new_tokens: int,
    block_size: int,
    *,
    is_pooled: bool = False,
    num_forks: int = 0,
    num_evicted: int = 0,
    num_shared: int = 0,
) -> QueuedWork:
    """Returns the work of one sequence of ``num_tokens``, of which the last ``num_new_tokens`` must be computed, and of
    its forks. ``num_shared`` of its blocks need no space of their own."""
    # The last token is always computed.
    num_new_tokens = max(1, num_new_tokens)
    work = QueuedWork(
        rows=0 if is_pooled else 1,
        pooled=int(is_pooled),
        tokens=num_new_tokens,
        kv=num_new_tokens * (num_tokens - num_new_tokens / 2),
        context=0 if is_pooled else num_tokens,
        pooled_context=num_tokens if is_pooled else 0,
        evicted_blocks=num_evicted,
        new_blocks=-(-num_tokens // block_size) - num_shared,
    )
    return work.plus(fork_work(num_tokens, num_forks, block_size)) if num_forks else work


def fork_work(num_tokens: int, num_forks: int, block_size: int) -> QueuedWork:
    """Returns the work of the other sequences of a request whose prompt has ``num_tokens``: they share its full blocks,
    and each computes the last one again."""
    tokens = num_forks * (1 + (num_tokens - 1) % block_size)
    return QueuedWork(
        rows=num_forks, tokens=tokens, kv=tokens * num_tokens, context=num_forks * num_tokens, new_blocks=num_forks
    )

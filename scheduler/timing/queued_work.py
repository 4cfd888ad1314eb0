"""How much work waits before a request: sums over sequences that are queued."""

from collections.abc import Iterable
from operator import add
from typing import NamedTuple


class QueuedWork(NamedTuple):
    """What waiting sequences need before they can decode; sums, where there are several."""

    rows: float = 0
    """Those that will decode, forks that do not exist yet included."""
    pooled: float = 0
    """Those that are embedded: they need a row only until their prompt is computed."""
    tokens: float = 0
    """To be computed: tokens of histories that are neither cached nor computed for a sequence before this one."""
    kv: float = 0
    """How many tokens each of these attends to, summed."""
    context: float = 0
    """Lengths of the histories of the ``rows``."""
    pooled_context: float = 0
    """Lengths of the histories of the ``pooled``."""
    evicted_blocks: float = 0
    """To be copied back from the host tier."""
    new_blocks: float = 0
    """Blocks of histories, those that are shared with a running sequence or one before this one left out."""

    @property
    def chunks(self) -> float:
        """Chunks of histories, if none is split."""
        return self.rows + self.pooled

    @property
    def length(self) -> float:
        """The mean length of a history."""
        return (self.context + self.pooled_context) / max(1, self.chunks)

    def plus(self, other: "QueuedWork") -> "QueuedWork":
        """The sum of both."""
        return QueuedWork(*map(add, self, other))

    def minus(self, other: "QueuedWork") -> "QueuedWork":
        """The rest without the other."""
        return QueuedWork(*[mine - its for mine, its in zip(self, other, strict=True)])


NO_WORK = QueuedWork()


def total_work(works: Iterable[QueuedWork]) -> QueuedWork:
    """The sum of all."""
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
    """The work of one sequence of ``num_tokens``, of which the last ``num_new_tokens`` have to be computed, and of its
    forks. ``num_shared`` of its blocks take no room of their own."""
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
    """The work of the other choices of a request whose prompt has ``num_tokens``: they share its full blocks, and each
    computes the last one again."""
    tokens = num_forks * (1 + (num_tokens - 1) % block_size)
    return QueuedWork(
        rows=num_forks, tokens=tokens, kv=tokens * num_tokens, context=num_forks * num_tokens, new_blocks=num_forks
    )

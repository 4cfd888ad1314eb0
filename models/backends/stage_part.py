"""What a backend provides so that its models can be divided into stages: how a rank loads its part, and what it
computes of a batch. Imports no tensor library."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.models.backends.pipeline_parallel import ModelPart, PartWork, StageSpeed
from penstock.models.batch.batch import Batch, BatchResult
from penstock.models.batch.rows import Ids
from penstock.models.batch.token_places import positions_of, slots_of
from penstock.scheduler.worker_config import WorkerConfig, WorkerFacts

Hidden = NDArray[Any]
"""The hidden states of tokens between two layers, in the type in which the backend keeps them: a line for each token,
of ``token_bytes`` bytes, contiguous."""
Bytes = NDArray[np.uint8]
"""The same as it came from another rank: the bytes of all lines."""


@dataclass(frozen=True)
class StageRows:
    """R rows with T tokens, as a rank that only computes layers knows them. See ``Batch``."""

    starts: Ids
    ends: Ids
    token_starts: Ids
    tables: Ids
    block_size: int

    @cached_property
    def positions(self) -> Ids:
        """(T,)."""
        return positions_of(self.starts, self.token_starts)

    @property
    def slots(self) -> Ids:
        """(T,)."""
        return slots_of(self.positions, self.token_starts, self.tables, self.block_size)

    def fresh_blocks(self) -> list[int]:
        """Returns the blocks whose first slot is written by this batch: what they held belongs to no row any more."""
        firsts, ends = -(-self.starts // self.block_size), -(-self.ends // self.block_size)
        return [
            int(block) for row in np.flatnonzero(ends > firsts) for block in self.tables[row, firsts[row] : ends[row]]
        ]


class LayerPart(Protocol):
    """The layers of a rank."""

    token_bytes: int
    """The bytes of a token's hidden state."""

    @property
    def facts(self) -> WorkerFacts:
        """The properties of the rank's part of the model."""

    def prefault(self) -> None:
        """See ``Backend``."""

    def compute(self, rows: StageRows, hidden: Bytes, wanted: Ids | None) -> Hidden:
        """Runs the layers on the hidden states of all tokens, and writes their KV. Returns the hidden states of the
        ``wanted`` tokens; None: of all."""


class BatchHead(Protocol):
    """What a batch returns besides hidden states, as it was when the batch began: rows may have changed since."""

    wanted: Ids
    """The indices of the tokens whose hidden states it needs, contiguous; possibly with repetitions."""

    def await_masks(self) -> None:
        """Waits for the masks of grammars. Called once if the batch has some."""

    def finish(self, hidden: Bytes) -> BatchResult:
        """Computes the head of the hidden states of the ``wanted`` tokens, in their order."""


class FirstPart(Protocol):
    """The part of rank 0: the first layers, and the ends."""

    token_bytes: int
    """The bytes of a token's hidden state."""

    @property
    def facts(self) -> WorkerFacts:
        """The properties of the rank's part of the model."""

    def prefault(self) -> None:
        """See ``Backend``."""

    def reset_blocks(self, block_ids: list[int]) -> None:
        """See ``Backend``."""

    def head_of(self, batch: Batch) -> BatchHead:
        """Returns the head of a batch that begins."""

    def begin(self, batch: Batch, tables: Ids, share: Callable[[Hidden], None] | None) -> Hidden:
        """Runs the layers, and writes their KV. Returns the hidden states of all tokens. ``tables`` are the batch's,
        contiguous. ``share`` sends the embedded tokens to the other ranks of the first stage, if there are any."""


class StageLoading(Protocol):
    """Loads a rank's part of a model: first the weights, then the pages for the blocks that every rank has room for."""

    config: WorkerConfig

    def measure_speed(self) -> StageSpeed:
        """Measures what the rank does at best, in about a second."""

    def work(self) -> tuple[list[PartWork], PartWork]:
        """Returns what a step does with each layer, and with the head, on a rank."""

    def load_weights(self, part: ModelPart) -> None:
        """Loads the weights of a part. Raises ModelError."""

    def num_blocks(self) -> int:
        """Returns how many KV blocks there is room for. Raises ModelError."""

    def first_part(self, num_blocks: int, layers: Sequence[int]) -> FirstPart:
        """Allocates the pages, and returns rank 0's part. ``layers`` are the numbers of layers of all stages. Raises
        ModelError."""

    def layer_part(self, num_blocks: int, layers: Sequence[int]) -> LayerPart:
        """Does the same for any other rank."""

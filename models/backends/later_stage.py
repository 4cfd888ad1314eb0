"""A rank of a model in stages, other than rank 0: it has some of the layers, and computes them for rank 0's batches."""

import time
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from penstock.models.backends.pipeline_parallel import ModelPart
from penstock.models.backends.stage_link import StageBatch, StageBlocks, StageFrame, StageLink, StageResult, connect
from penstock.models.backends.stage_part import Bytes, LayerPart, StageLoading, StageRows
from penstock.models.backends.tensor_parallel import PeerLost
from penstock.models.batch.rows import Ids
from penstock.scheduler.worker_config import WorkerConfig

NOTHING: Ids = np.empty(0, dtype=np.int64)


class StageRank:
    """A ``LaterStage`` over a backend's layers. All ranks of a stage compute the same hidden states, so only the first
    one returns them; those of the first stage return nothing, since rank 0 has them."""

    def __init__(self, part: LayerPart, link: StageLink, config: WorkerConfig) -> None:
        self.facts = part.facts
        self._part = part
        self._link = link
        self._returns = config.tensor_parallel_rank == 0
        self._is_last = config.pipeline_parallel_rank == config.pipeline_parallel_size - 1

    def serve(self) -> NoReturn:
        """Computes batches until rank 0 is lost. Raises PeerLost."""
        self._part.prefault()
        while True:
            self._compute(*self._link.receive(StageFrame.BATCH))

    def _compute(self, batch: StageBatch, data: Bytes) -> None:
        began = time.monotonic_ns()
        rows = batch.num_rows
        ends = np.cumsum((rows, rows, rows + 1, rows * batch.table_width, batch.num_wanted))
        size = 8 * int(ends[-1])
        if len(data) != size + batch.num_tokens * self._part.token_bytes:
            raise PeerLost(f"rank 0 sent {len(data)} bytes for a batch of {batch.num_tokens} tokens")
        numbers, hidden = data[:size].view(np.int64), data[size:]
        starts, row_ends, token_starts, tables, wanted = np.split(numbers, ends[:-1])
        stage_rows = StageRows(
            starts, row_ends, token_starts, tables.reshape(rows, batch.table_width), self.facts.block_size
        )
        if not self._returns:
            self._part.compute(stage_rows, hidden, NOTHING)
            return
        out = self._part.compute(stage_rows, hidden, wanted if self._is_last else None)
        batch.computed_us = (time.monotonic_ns() - began) // 1000
        if self._is_last:
            self._link.send(StageFrame.RESULT, StageResult(batch.computed_us), (out,))
        else:
            self._link.send(StageFrame.BATCH, batch, (numbers, out))


def load_later_stage(config: WorkerConfig, open_loading: Callable[[], StageLoading]) -> StageRank:
    """Loads the part of a rank that is not rank 0. ``open_loading`` may wait for the other ranks of the stage. Raises
    ModelError and PeerLost."""
    link = connect(config)
    loading = open_loading()
    layers, _ = link.receive(StageFrame.LAYERS)
    if not layers.layers:
        link.send(StageFrame.SPEED, loading.measure_speed())
        layers, _ = link.receive(StageFrame.LAYERS)
    loading.load_weights(ModelPart.of_rank(config, layers.layers))
    link.send(StageFrame.ROOM, StageBlocks(loading.num_blocks()))
    blocks, _ = link.receive(StageFrame.BLOCKS)
    part = loading.layer_part(blocks.num_blocks, layers.layers)
    link.send(StageFrame.READY, None)
    return StageRank(part, link, config)

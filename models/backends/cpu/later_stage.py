"""A later stage of a pipeline on CPUs: it has some of the layers, and computes them for batches of the first stage."""

import time
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu.bindings import address
from penstock.kernels.cpu.program import Memory, Step
from penstock.models.backends.cpu.loading import SMALL_STEP, ModelLoading
from penstock.models.backends.cpu.memory import FirstPages
from penstock.models.backends.cpu.model import CpuModel
from penstock.models.backends.pipeline_parallel import ModelPart
from penstock.models.backends.stage_link import (
    Bytes,
    StageBatch,
    StageBlocks,
    StageFrame,
    StageLink,
    StageResult,
    connect,
)
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.scheduler.worker_config import WorkerConfig, WorkerFacts


class CpuLaterStage:
    """A stage that computes its layers, batch by batch."""

    def __init__(self, model: CpuModel, pages: Memory, facts: WorkerFacts, link: StageLink, *, is_last: bool) -> None:
        self.facts = facts
        self._link = link
        self._is_last = is_last
        self._first_pages = FirstPages(pages, model.model.page_bytes)
        self._program = model.program(pages)
        self._small_step = SMALL_STEP // model.num_parameters
        self._model = model

    def serve(self) -> NoReturn:
        """Computes batches until the first stage is lost. Raises PeerLost."""
        self._first_pages.start_prefault()
        while True:
            self._compute(*self._link.receive(StageFrame.BATCH))

    def _compute(self, batch: StageBatch, data: Bytes) -> None:
        began = time.monotonic_ns()
        rows, tokens, hidden_size = batch.num_rows, batch.num_tokens, self.facts.hidden_size
        sizes = (rows, rows, rows + 1, rows * batch.table_width, batch.num_wanted)
        ends = np.cumsum(sizes)
        numbers = data[: 8 * ends[-1]].view(np.int64)
        starts, row_ends, token_starts, tables, wanted = np.split(numbers, ends[:-1])
        hidden = data[8 * ends[-1] :].view(np.float32)
        assert hidden.size == tokens * hidden_size, "every token has a hidden state"
        computed = wanted if self._is_last else np.arange(tokens)
        out: NDArray[np.float32] = np.empty((len(computed), hidden_size), dtype=np.float32)
        step = Step(
            num_tokens=tokens, num_rows=rows, starts=address(starts), ends=address(row_ends),
            token_starts=address(token_starts), tables=address(tables), table_stride=batch.table_width,
            num_sampled=len(computed), sampled=address(computed), hidden=address(hidden), hidden_out=address(out),
        )  # fmt: skip
        with self._first_pages.paused():
            self._program.run(step, 1 if tokens <= self._small_step else self.facts.num_threads)
        batch.computed_us = (time.monotonic_ns() - began) // 1000
        if self._is_last:
            self._link.send(StageFrame.RESULT, StageResult(batch.computed_us), (out,))
        else:
            self._link.send(StageFrame.BATCH, batch, (numbers, out))


def load_later_stage(config: WorkerConfig, info: CheckpointInfo) -> CpuLaterStage:
    """Loads a later stage's part of a model; ``unsupported_reason`` must be None. Raises ModelError and PeerLost."""
    link = connect(config)
    loading = ModelLoading(config, info)
    layers, _ = link.receive(StageFrame.LAYERS)
    if not layers.layers:
        link.send(StageFrame.SPEED, loading.measure_speed())
        layers, _ = link.receive(StageFrame.LAYERS)
    stage = config.pipeline_parallel_rank
    part = ModelPart.of_stage(stage, layers.layers)
    model = loading.load_weights(part)
    link.send(StageFrame.ROOM, StageBlocks(loading.cache_sizes(part).num_blocks))
    blocks, _ = link.receive(StageFrame.BLOCKS)
    pages = loading.allocate_pages(part, blocks.num_blocks)
    link.send(StageFrame.READY, None)
    facts = loading.facts(part, model.weight_bytes, blocks.num_blocks, layers.layers)
    return CpuLaterStage(model, pages, facts, link, is_last=stage == config.pipeline_parallel_size - 1)

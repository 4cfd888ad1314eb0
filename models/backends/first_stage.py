"""Rank 0 of a model in stages: a ``Backend`` whose other layers are computed by other ranks."""

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.base import Finish
from penstock.models.backends.pipeline_parallel import ModelPart, StageSpeed, check_stages, divide_layers
from penstock.models.backends.stage_link import (
    StageBatch,
    StageBlocks,
    StageFrame,
    StageLayers,
    StageLink,
    StageResult,
    accept_ranks,
    listen,
)
from penstock.models.backends.stage_part import Bytes, FirstPart, Hidden, StageLoading
from penstock.models.backends.tensor_parallel import PeerLost
from penstock.models.batch.batch import Batch, BatchResult
from penstock.models.checkpoint.lora.adapter import LoraAdapter
from penstock.models.errors import ModelError
from penstock.scheduler.worker_config import WorkerConfig

logger = logging.getLogger(__name__)


class _Returned(NamedTuple):
    """What came back of a batch: its hidden states for the head, or why none will come."""

    hidden: Bytes | PeerLost


class FirstStage:
    """A ``Backend`` that computes its own layers of a batch, sends the rest on its way, and computes the head when the
    hidden states come back. Meanwhile the next batch may start, if it has no row of this one."""

    runs_ahead, needs_tokens, states = True, True, None

    def __init__(self, part: FirstPart, links: Sequence[StageLink], ranks_per_stage: int) -> None:
        """``links`` are those to all other ranks, in their order."""
        self.facts = part.facts
        self._part = part
        first = ranks_per_stage - 1
        stages = [links[begin : begin + ranks_per_stage] for begin in range(first, len(links), ranks_per_stage)]
        self._stages: list[Sequence[StageLink]] = [links[:first], *stages]
        """The links to the other ranks of each stage."""
        self._computing = threading.Lock()
        """Held while this rank computes layers or the head, which need the same cores."""
        self._returned: SimpleQueue[_Returned] = SimpleQueue()
        self.computed_s = [0.0] * len(self._stages)
        """How long each later stage has computed."""
        for stage, of_stage in enumerate(self._stages):
            for link in of_stage:
                name = f"stage {stage + 1}"
                threading.Thread(target=self._receive, args=(stage, link), name=name, daemon=True).start()

    def reset_blocks(self, block_ids: list[int]) -> None:
        """Discards this rank's part of the blocks. The others see by themselves which blocks a batch begins."""
        self._part.reset_blocks(block_ids)

    def copy_out(self, copies: list[tuple[int, int]]) -> None:
        """Never called: ``load_first_stage`` refuses a host tier, so no plan has copies."""
        raise AssertionError("there is no host tier")

    copy_in = copy_out

    def load_adapter(self, slot: int, adapter: LoraAdapter) -> None:
        """Never called: adapters and stages together are refused at the start."""
        raise AssertionError("there are no slots for adapters")

    def prefault(self) -> None:
        self._part.prefault()

    def start_step(self, batch: Batch) -> Finish:
        assert not batch.feature_layers, "a drafter that reads layers was refused"
        head = self._part.head_of(batch)
        wanted, tables = head.wanted, np.ascontiguousarray(batch.tables)
        header = StageBatch(len(batch.token_ids), len(batch.rows), len(wanted), tables.shape[1])

        def send(links: Sequence[StageLink], hidden: Hidden) -> None:
            for link in links:
                arrays = (batch.starts, batch.ends, batch.token_starts, tables, wanted, hidden)
                link.send(StageFrame.BATCH, header, arrays)

        beside, after, *_ = self._stages
        with self._computing:
            hidden = self._part.begin(batch, tables, (lambda embedded: send(beside, embedded)) if beside else None)
        send(after, hidden)
        if batch.masks is not None:  # the runner reads which rows are late
            head.await_masks()

        def finish() -> BatchResult:
            returned = self._returned.get().hidden
            if isinstance(returned, PeerLost):
                self._returned.put(_Returned(returned))  # for those that come after
                raise returned
            if returned.nbytes != len(wanted) * self._part.token_bytes:
                raise PeerLost(f"the last stage returned {returned.nbytes} bytes for {len(wanted)} tokens")
            with self._computing:
                return head.finish(returned)

        return finish

    def _receive(self, stage: int, link: StageLink) -> None:
        """Receives what a rank returns until it is lost, and sends it on, unless its stage is the last. Only the first
        rank of a later stage returns something."""
        try:
            while True:
                body, data = link.receive(StageFrame.BATCH, StageFrame.RESULT)
                self.computed_s[stage] += body.computed_us / 1e6
                if isinstance(body, StageResult):
                    self._returned.put(_Returned(data))
                    continue
                for following in self._stages[stage + 1]:
                    following.send(StageFrame.BATCH, body, (data,))
        except PeerLost as error:
            self._returned.put(_Returned(error))


def load_first_stage(config: WorkerConfig, spec: ModelSpec, open_loading: Callable[[], StageLoading]) -> FirstStage:
    """Loads rank 0's part of a model, once the other ranks have joined. ``open_loading`` may wait for the other ranks
    of the stage, which connect first. Raises ModelError and PeerLost."""
    check_stages(spec, config.pipeline_parallel_size)
    if config.host_kv_cache_bytes:
        raise ModelError(
            "--host-kv-cache-bytes: does not work with --pipeline-parallel-size above 1, since only rank 0 gets plans, "
            "which say what to copy: leave it out"
        )
    try:
        listener = listen(config)
    except OSError as error:
        raise ModelError(f"the socket at which the stages meet cannot be opened: {error}") from error
    loading = open_loading()
    links = accept_ranks(config, listener)
    layers = config.stage_layers or _agree_on_layers(loading, links)
    for link in links:
        link.send(StageFrame.LAYERS, StageLayers(layers))
    loading.load_weights(ModelPart.of_rank(config, layers))
    num_blocks = min([loading.num_blocks(), *(link.receive(StageFrame.ROOM)[0].num_blocks for link in links)])
    for link in links:
        link.send(StageFrame.BLOCKS, StageBlocks(num_blocks))
    part = loading.first_part(num_blocks, layers)
    for link in links:
        link.receive(StageFrame.READY)
    return FirstStage(part, links, config.tensor_parallel_size)


def _agree_on_layers(loading: StageLoading, links: Sequence[StageLink]) -> tuple[int, ...]:
    """Divides the layers by the measured speeds of all stages. A stage is as fast as its slowest rank."""
    for link in links:
        link.send(StageFrame.LAYERS, StageLayers(()))
    ranks = [loading.measure_speed(), *(link.receive(StageFrame.SPEED)[0] for link in links)]
    size = loading.config.tensor_parallel_size
    speeds = [_slowest(ranks[begin : begin + size]) for begin in range(0, len(ranks), size)]
    layers = divide_layers(*loading.work(), speeds)
    for stage, (number, speed) in enumerate(zip(layers, speeds, strict=True)):
        logger.info(
            "stage %d of %d has %d layers%s; %s reads %.1f GB/s and computes %.0f GFLOP/s",
            stage + 1,
            len(layers),
            number,
            "" if stage else ", the embedding and the head",
            "it" if size == 1 else f"each of its {size} ranks",
            speed.bytes_read / 1e9,
            speed.operations / 1e9,
        )
    return layers


def _slowest(speeds: Sequence[StageSpeed]) -> StageSpeed:
    return StageSpeed(min(speed.bytes_read for speed in speeds), min(speed.operations for speed in speeds))

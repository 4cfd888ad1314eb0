"""The first stage of a pipeline on CPUs: a ``Backend`` whose later layers are computed by other processes."""

import ctypes
import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu.bindings import address
from penstock.kernels.cpu.program import DecoderModel, Memory, PackedLinear, Program, Step
from penstock.models.backends.base import Finish
from penstock.models.backends.cpu.loading import SMALL_STEP, ModelLoading
from penstock.models.backends.cpu.memory import FirstPages
from penstock.models.backends.cpu.model import CpuModel
from penstock.models.backends.cpu.outputs import BatchOutputs, batch_fields
from penstock.models.backends.cpu.sampling import SamplingRows
from penstock.models.backends.pipeline_parallel import ModelPart, check_stages, divide_layers
from penstock.models.backends.stage_link import (
    StageBatch,
    StageBlocks,
    StageFrame,
    StageLayers,
    StageLink,
    StageResult,
    accept_stages,
    listen,
)
from penstock.models.backends.tensor_parallel import PeerLost
from penstock.models.batch.batch import Batch, BatchResult
from penstock.models.checkpoint.lora.adapter import LoraAdapter
from penstock.models.errors import ModelError
from penstock.scheduler.worker_config import WorkerFacts

logger = logging.getLogger(__name__)

Floats = NDArray[np.float32]


class _Returned(NamedTuple):
    """What came back of a batch: its hidden states for the head, or why none will come."""

    hidden: Floats | PeerLost


class FirstStage:
    """A ``Backend`` that computes its own layers of a batch, sends the rest on its way, and computes the head when the
    hidden states come back. Meanwhile the next batch may start, if it has no row of this one."""

    runs_ahead, needs_tokens, states = True, True, None

    def __init__(self, model: CpuModel, pages: Memory, facts: WorkerFacts, links: Sequence[StageLink]) -> None:
        self.facts = facts
        self.model = model
        self._links = links
        self._first_pages = FirstPages(pages, model.model.page_bytes)
        self._layers = _program(model, pages, head=PackedLinear())
        self._head = _program(model, pages, num_layers=0)
        self._num_logits = model.model.num_logits
        self._small_step = SMALL_STEP // model.num_parameters
        self._computing = threading.Lock()
        """Held while this stage computes layers or the head, which need the same cores."""
        self._returned: SimpleQueue[_Returned] = SimpleQueue()
        self.computed_s = [0.0] * len(links)
        """How long each later stage has computed."""
        for number in range(len(links)):
            threading.Thread(target=self._receive, args=(number,), name=f"stage {number + 1}", daemon=True).start()

    def reset_blocks(self, block_ids: list[int]) -> None:
        """Does nothing: the kernel that first writes a page zeroes its masked slots."""

    def copy_out(self, copies: list[tuple[int, int]]) -> None:
        """Never called: there is no host tier, so no plan has copies."""
        raise AssertionError("the device's memory is the host's")

    copy_in = copy_out

    def load_adapter(self, slot: int, adapter: LoraAdapter) -> None:
        """Never called: adapters and stages together are refused at the start."""
        raise AssertionError("there are no slots for adapters")

    def prefault(self) -> None:
        self._first_pages.start_prefault()

    def start_step(self, batch: Batch) -> Finish:
        assert not batch.feature_layers, "a drafter that reads layers was refused"
        # A table of its own: this batch needs it until the head is computed, after the next batch has begun.
        outputs = BatchOutputs(batch, SamplingRows(), self._num_logits)
        wanted = np.ascontiguousarray(outputs.wanted_tokens())
        tables = np.ascontiguousarray(batch.tables)
        num_tokens = len(batch.token_ids)
        hidden: Floats = np.empty((num_tokens, self.facts.hidden_size), dtype=np.float32)
        everything = np.arange(num_tokens)
        step = Step(
            **batch_fields(batch, tables),
            num_sampled=num_tokens, sampled=address(everything), hidden_out=address(hidden),
        )  # fmt: skip
        with self._computing, self._first_pages.paused():
            self._layers.run(step, self._num_threads(num_tokens))
        header = StageBatch(num_tokens, len(batch.rows), len(wanted), tables.shape[1])
        arrays = (batch.starts, batch.ends, batch.token_starts, tables, wanted, hidden)
        self._links[0].send(StageFrame.BATCH, header, arrays)
        if batch.masks is not None:  # the runner reads which rows are late
            outputs.apply_masks()

        def finish() -> BatchResult:
            returned = self._returned.get().hidden
            if isinstance(returned, PeerLost):
                self._returned.put(_Returned(returned))  # for those that come after
                raise returned
            if returned.size != len(wanted) * self.facts.hidden_size:
                raise PeerLost(f"the last stage returned {returned.size} numbers for {len(wanted)} tokens")
            if len(wanted):
                head_step = Step(num_tokens=len(wanted), hidden=address(returned), **outputs.fields)
                with self._computing:
                    self._head.run(head_step, self._num_threads(len(wanted)))
            return outputs.result()

        return finish

    def seconds(self) -> dict[str, float]:
        """Returns the time spent in each stage of a step so far, in this process."""
        head = self._head.seconds()
        return {name: seconds + head[name] for name, seconds in self._layers.seconds().items()}

    def _num_threads(self, num_tokens: int) -> int:
        return 1 if num_tokens <= self._small_step else self.facts.num_threads

    def _receive(self, number: int) -> None:
        """Receives what a later stage returns until it is lost, and sends it on, unless the stage is the last."""
        try:
            while True:
                body, data = self._links[number].receive(StageFrame.BATCH, StageFrame.RESULT)
                self.computed_s[number] += body.computed_us / 1e6
                if isinstance(body, StageResult):
                    self._returned.put(_Returned(data.view(np.float32)))
                else:
                    self._links[number + 1].send(StageFrame.BATCH, body, (data,))
        except (PeerLost, ValueError) as error:  # the latter if the number of bytes is not a multiple of four
            self._returned.put(_Returned(error if isinstance(error, PeerLost) else PeerLost(str(error))))


def load_first_stage(loading: ModelLoading) -> FirstStage:
    """Loads the first stage's part of a model, once the other stages have joined. Raises ModelError and PeerLost."""
    config, spec = loading.config, loading.spec
    check_stages(spec, config.pipeline_parallel_size)
    try:
        listener = listen(config)
    except OSError as error:
        raise ModelError(f"the socket at which the stages meet cannot be opened: {error}") from error
    links = accept_stages(config, listener)
    layers = config.stage_layers or _agree_on_layers(loading, links)
    for link in links:
        link.send(StageFrame.LAYERS, StageLayers(layers))
    part = ModelPart.of_stage(0, layers)
    model = loading.load_weights(part)
    num_blocks = min(
        [loading.cache_sizes(part).num_blocks, *(link.receive(StageFrame.ROOM)[0].num_blocks for link in links)]
    )
    for link in links:
        link.send(StageFrame.BLOCKS, StageBlocks(num_blocks))
    pages = loading.allocate_pages(part, num_blocks)
    for link in links:
        link.receive(StageFrame.READY)
    return FirstStage(model, pages, loading.facts(part, model.weight_bytes, num_blocks, layers), links)


def _agree_on_layers(loading: ModelLoading, links: Sequence[StageLink]) -> tuple[int, ...]:
    """Divides the layers by the measured speeds of all stages."""
    for link in links:
        link.send(StageFrame.LAYERS, StageLayers(()))
    speeds = [loading.measure_speed(), *(link.receive(StageFrame.SPEED)[0] for link in links)]
    layers = divide_layers(*loading.work(), speeds)
    for stage, (number, speed) in enumerate(zip(layers, speeds, strict=True)):
        logger.info(
            "stage %d of %d has %d layers%s; it reads %.1f GB/s and computes %.0f GFLOP/s",
            stage + 1,
            len(layers),
            number,
            "" if stage else ", the embedding and the head",
            speed.bytes_read / 1e9,
            speed.operations / 1e9,
        )
    return layers


def _program(model: CpuModel, pages: Memory, **changes: object) -> Program:
    """Returns the program of a part of the model that this process has."""
    part = DecoderModel()
    ctypes.pointer(part)[0] = model.model
    for name, value in changes.items():
        setattr(part, name, value)
    return model.program(pages, part)

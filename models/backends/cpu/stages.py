"""The parts of a model in stages on CPUs. Hidden states are in float32."""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu.bindings import address
from penstock.kernels.cpu.program import DecoderModel, Memory, PackedLinear, Program, Step
from penstock.models.backends.cpu.loading import ModelLoading
from penstock.models.backends.cpu.memory import FirstPages
from penstock.models.backends.cpu.model import CpuModel, seen_pairs
from penstock.models.backends.cpu.outputs import BatchOutputs, batch_fields
from penstock.models.backends.cpu.sampling import SamplingRows
from penstock.models.backends.pipeline_parallel import ModelPart, PartWork, StageSpeed
from penstock.models.backends.stage_part import Bytes, Hidden, StageRows
from penstock.models.batch.batch import Batch, BatchResult
from penstock.models.batch.rows import Ids
from penstock.scheduler.worker_config import WorkerFacts

Floats = NDArray[np.float32]


class CpuFirstPart:
    """A ``FirstPart`` on the library: the layers and the head are two programs."""

    def __init__(self, model: CpuModel, pages: Memory, facts: WorkerFacts) -> None:
        self.facts = facts
        self.token_bytes = 4 * facts.hidden_size
        self._first_pages = FirstPages(pages, model.model.page_bytes)
        self._layers = _program(model, pages, head=PackedLinear())
        self._head = _program(model, pages, num_layers=0)
        self._num_logits = model.model.num_logits
        self._model = model  # the programs point into it

    def prefault(self) -> None:
        self._first_pages.start_prefault()

    def reset_blocks(self, block_ids: list[int]) -> None:
        """Does nothing: the kernel that first writes a page zeroes its masked slots."""

    def head_of(self, batch: Batch) -> "_CpuHead":
        return _CpuHead(self, batch, self._num_logits)

    def begin(self, batch: Batch, tables: Ids, share: Callable[[Hidden], None] | None) -> Hidden:
        assert share is None, "a stage on CPUs has one rank"
        num_tokens = len(batch.token_ids)
        hidden: Floats = np.empty((num_tokens, self.facts.hidden_size), dtype=np.float32)
        everything = np.arange(num_tokens)
        step = Step(
            **batch_fields(batch, tables),
            num_sampled=num_tokens, sampled=address(everything), hidden_out=address(hidden),
        )  # fmt: skip
        with self._first_pages.paused():
            self._layers.run(step, self._model.num_threads(num_tokens, seen_pairs(batch.starts, batch.ends)))
        return hidden

    def run_head(self, step: Step, num_tokens: int) -> None:
        self._head.run(step, self._model.num_threads(num_tokens))


class _CpuHead:
    """A ``BatchHead``."""

    def __init__(self, part: CpuFirstPart, batch: Batch, num_logits: int) -> None:
        self._part = part
        # A table of its own: the batch needs it until the head is computed, after the next batch has begun.
        self._outputs = BatchOutputs(batch, SamplingRows(), num_logits)
        self.wanted = np.ascontiguousarray(self._outputs.wanted_tokens())

    def await_masks(self) -> None:
        self._outputs.apply_masks()

    def finish(self, hidden: Bytes) -> BatchResult:
        if len(self.wanted):
            step = Step(num_tokens=len(self.wanted), hidden=address(hidden), **self._outputs.fields)
            self._part.run_head(step, len(self.wanted))
        return self._outputs.result()


class CpuLayerPart:
    """A ``LayerPart`` on the library."""

    def __init__(self, model: CpuModel, pages: Memory, facts: WorkerFacts) -> None:
        self.facts = facts
        self.token_bytes = 4 * facts.hidden_size
        self._first_pages = FirstPages(pages, model.model.page_bytes)
        self._program = model.program(pages)
        self._model = model

    def prefault(self) -> None:
        self._first_pages.start_prefault()

    def compute(self, rows: StageRows, hidden: Bytes, wanted: Ids | None) -> Hidden:
        num_tokens = len(hidden) // self.token_bytes
        computed = np.arange(num_tokens) if wanted is None else wanted
        out: Floats = np.empty((len(computed), self.facts.hidden_size), dtype=np.float32)
        step = Step(
            num_tokens=num_tokens, num_rows=len(rows.starts), starts=address(rows.starts), ends=address(rows.ends),
            token_starts=address(rows.token_starts), tables=address(rows.tables), table_stride=rows.tables.shape[1],
            num_sampled=len(computed), sampled=address(computed), hidden=address(hidden), hidden_out=address(out),
        )  # fmt: skip
        with self._first_pages.paused():
            self._program.run(step, self._model.num_threads(num_tokens, seen_pairs(rows.starts, rows.ends)))
        return out


class CpuStageLoading:
    """A ``StageLoading``."""

    def __init__(self, loading: ModelLoading) -> None:
        self.config = loading.config
        self._loading = loading
        self._part = ModelPart.whole(loading.spec)
        self._model: CpuModel | None = None

    def measure_speed(self) -> StageSpeed:
        return self._loading.measure_speed()

    def work(self) -> tuple[list[PartWork], PartWork]:
        return self._loading.work()

    def load_weights(self, part: ModelPart) -> None:
        self._part, self._model = part, self._loading.load_weights(part)

    def num_blocks(self) -> int:
        return self._loading.cache_sizes(self._part).num_blocks

    def first_part(self, num_blocks: int, layers: Sequence[int]) -> CpuFirstPart:
        return CpuFirstPart(*self._allocate(num_blocks, layers))

    def layer_part(self, num_blocks: int, layers: Sequence[int]) -> CpuLayerPart:
        return CpuLayerPart(*self._allocate(num_blocks, layers))

    def _allocate(self, num_blocks: int, layers: Sequence[int]) -> tuple[CpuModel, Memory, WorkerFacts]:
        model = self._model
        assert model is not None, "the weights come first"
        pages = self._loading.allocate_pages(self._part, num_blocks)
        return model, pages, self._loading.facts(self._part, model.weight_bytes, num_blocks, tuple(layers))


def _program(model: CpuModel, pages: Memory, **changes: object) -> Program:
    """Returns the program of a part of the model that this process has."""
    part = DecoderModel()
    ctypes.pointer(part)[0] = model.model
    for name, value in changes.items():
        setattr(part, name, value)
    return model.program(pages, part)

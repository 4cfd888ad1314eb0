"""The CPU backend: a step is one call into the library, which runs the model and samples the tokens."""

import numpy as np

from penstock.kernels.cpu.bindings import LANES, LibraryMissing, address
from penstock.kernels.cpu.program import Memory, Step, typed_library
from penstock.models.backends.base import Backend, SynchronousBackend
from penstock.models.backends.cpu.adapters import CpuAdapters
from penstock.models.backends.cpu.loading import DTYPES, ModelLoading
from penstock.models.backends.cpu.memory import FirstPages
from penstock.models.backends.cpu.model import CpuModel, seen_pairs
from penstock.models.backends.cpu.outputs import BatchOutputs, Features, batch_fields
from penstock.models.backends.cpu.recurrent import CpuStates, StepStates
from penstock.models.backends.cpu.sampling import SamplingRows
from penstock.models.backends.cpu.stages import CpuStageLoading
from penstock.models.backends.cpu.weights import is_kept
from penstock.models.backends.first_stage import load_first_stage
from penstock.models.backends.later_stage import StageRank, load_later_stage
from penstock.models.backends.pipeline_parallel import ModelPart
from penstock.models.batch.batch import Batch, BatchResult
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.checkpoint.lora.adapter import LoraAdapter
from penstock.scheduler.worker_config import WorkerConfig, WorkerFacts


class CpuBackend(SynchronousBackend):
    """A ``Backend`` over the CPU library."""

    def __init__(
        self,
        model: CpuModel,
        pages: Memory,
        facts: WorkerFacts,
        states: Memory | None = None,
        adapters: CpuAdapters | None = None,
    ) -> None:
        self.facts = facts
        self.model = model
        self._adapters = adapters
        if adapters is not None:
            adapters.attach(model.model)
        self._first_pages = FirstPages(pages, model.model.page_bytes)
        self._program = model.program(pages, states=states)
        self.states = None if states is None else CpuStates(states, facts.state_bytes, self._program)
        self._num_logits = model.model.num_logits
        self._sampling = SamplingRows()

    def reset_blocks(self, block_ids: list[int]) -> None:
        """Does nothing: the kernel that first writes a page zeroes its masked slots."""

    def copy_out(self, copies: list[tuple[int, int]]) -> None:
        """Never called: there is no host tier, so no plan has copies."""
        raise AssertionError("the device's memory is the host's")

    copy_in = copy_out

    def load_adapter(self, slot: int, adapter: LoraAdapter) -> None:
        assert self._adapters is not None, "there are no slots for adapters"
        self._adapters.load(slot, adapter)

    def run(self, batch: Batch) -> BatchResult:
        """Runs the layers and samples the tokens: in one call, or in two if masks are awaited in between."""
        outputs = BatchOutputs(batch, self._sampling, self._num_logits)
        features = Features(batch, self.facts.hidden_size) if batch.feature_layers else None
        tables = np.ascontiguousarray(batch.tables)
        windows = np.ascontiguousarray(batch.window_tables) if self.facts.num_window_groups else tables[:0]
        states = StepStates.of_batch(batch) if batch.states else None
        step = Step(**batch_fields(batch, tables), **outputs.fields, **(features.fields if features else {}))
        step.window_tables, step.num_window_groups, step.window = address(windows), len(windows), self.facts.window
        if states is not None:
            step.states = states.rows
        slots = batch.adapters if self._adapters is not None else None  # a draft model's rows may have some
        if slots is not None:
            step.adapters = address(slots)
        num_threads = self.model.num_threads(len(batch.token_ids), seen_pairs(batch.starts, batch.ends))
        with self._first_pages.paused():
            if batch.masks is None:
                self._program.run(step, num_threads)
            else:
                self._program.start_step(step, num_threads)
                outputs.apply_masks()
                self._program.finish()
        return outputs.result(features)

    def prefault(self) -> None:
        self._first_pages.start_prefault()

    def seconds(self) -> dict[str, float]:
        """Returns the time spent in each stage of a step so far."""
        return self._program.seconds()


def unsupported_reason(config: WorkerConfig, info: CheckpointInfo) -> str | None:
    """Returns why this backend cannot run the model with this config, with the remedy; None if it can."""
    if config.device != "cpu":
        return f"--device is {config.device}, and this backend is for CPUs: give --device cpu, or leave --backend out"
    if config.dtype not in ("auto", *DTYPES):
        return (
            f"--dtype is {config.dtype}, and this backend has bfloat16 and float32: give one of them, or leave --dtype "
            "out"
        )
    if config.tensor_parallel_size > 1:
        return (
            f"--tensor-parallel-size is {config.tensor_parallel_size}, and this backend uses all cores in one process: "
            "leave that out"
        )
    if info.at_load(config.quantization) == "fp8":
        return "--quantization fp8 is for the backend cuda: give int8, which takes the same bytes"
    if config.block_size % LANES:
        return f"--block-size is {config.block_size}, and pages hold {LANES} tokens: give a multiple of that"
    if _experts_differ(info):
        return "its experts are quantised differently, or by act-order: use a checkpoint with desc_act or actorder off"
    try:
        typed_library()
    except LibraryMissing as error:
        return str(error)
    return None


def _experts_differ(info: CheckpointInfo) -> bool:
    """Whether experts need differently prepared inputs: inputs are prepared once for all of them."""
    experts = [name.removesuffix(".weight") for name, shape in info.spec.tensors() if ".experts." in name and shape[1:]]
    linears = [info.quantized.get(name) for name in experts]
    schemes = {linear.scheme if linear is not None and is_kept(linear.scheme) else None for linear in linears}
    return len(schemes) > 1 or any(scheme is not None and scheme.is_ordered for scheme in schemes)


def load(config: WorkerConfig, info: CheckpointInfo) -> Backend:
    """The factory for the backend registry; ``unsupported_reason`` must be None. Raises ModelError."""
    if config.pipeline_parallel_size > 1:
        return load_first_stage(config, info.spec, lambda: CpuStageLoading(ModelLoading(config, info)))
    loading = ModelLoading(config, info)
    part = ModelPart.whole(loading.spec)
    model = loading.load_weights(part)
    adapters = loading.allocate_adapters() if config.max_loras else None  # before the KV cache gets the rest
    num_blocks, num_slots = loading.cache_sizes(part)
    pages, states = loading.allocate_pages(part, num_blocks), loading.allocate_states(num_slots)
    facts = loading.facts(part, model.weight_bytes, num_blocks, num_state_slots=num_slots)
    return CpuBackend(model, pages, facts, states, adapters)


def load_stage(config: WorkerConfig, info: CheckpointInfo) -> StageRank:
    """The factory of ranks that only compute layers; ``unsupported_reason`` must be None. Raises ModelError and
    PeerLost."""
    return load_later_stage(config, lambda: CpuStageLoading(ModelLoading(config, info)))

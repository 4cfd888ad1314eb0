"""The backend for NVIDIA GPUs: Triton kernels, and cuBLAS for products whose bits may depend on the batch. A step is
launched as a whole, as a CUDA graph if it is small, and the next one may be launched before it ends.

With TRITON_INTERPRET=1 everything runs on a CPU, a thousand times slower, for tests without a GPU.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from penstock.kernels.cuda.attention.common import MAX_HEAD_DIM, MAX_ROTATED_DIM, MIN_HEAD_DIM, PAGE_SLOTS, RaggedRows
from penstock.kernels.cuda.core.launch import (
    FP8_CAPABILITY,
    MIN_CAPABILITY,
    capability_of,
    interpreted,
    launches,
    shared_bytes_of,
)
from penstock.kernels.cuda.recurrent.scan import MAX_KEY_SIZE
from penstock.kernels.cuda.sampling.tensors import MAX_VOCAB
from penstock.kernels.cuda.step import MIN_SEQUENCES, commit, prepare
from penstock.kernels.reference.upcast import upcast
from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import LatentAttention
from penstock.models.backends.base import Backend, Finish
from penstock.models.backends.cuda.adapters import CudaAdapters
from penstock.models.backends.cuda.attention_libraries import unsupported_attention
from penstock.models.backends.cuda.loading import DTYPES, KV_DTYPES, CudaLoading, StepMemory, dtype_name_of
from penstock.models.backends.cuda.model import CudaModel, Hidden
from penstock.models.backends.cuda.recurrent import RecurrentStep
from penstock.models.backends.cuda.steps.features import DeviceFeatures
from penstock.models.backends.cuda.steps.graphs import StepGraphs, graph_sizes
from penstock.models.backends.cuda.steps.states import CudaStates
from penstock.models.backends.cuda.steps.step_io import Size
from penstock.models.backends.first_stage import load_first_stage
from penstock.models.backends.later_stage import StageRank, load_later_stage
from penstock.models.backends.torch_common.device import torch_device
from penstock.models.backends.torch_common.host_pages import HostPages
from penstock.models.backends.torch_common.outputs import HiddenReads
from penstock.models.batch.batch import Batch, BatchResult
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.checkpoint.lora.adapter import LoraAdapter
from penstock.scheduler.worker_config import DraftMethod, WorkerConfig, WorkerFacts

WIDE_DIM, WIDE_HEAD_BYTES, WIDE_LATENT_BYTES = 256, 160 << 10, 104 << 10
"""In float32, heads of more dimensions need this much shared memory for each program, and latents that much, with a
single stage."""


class CudaBackend:
    """A ``Backend`` that keeps its rows on the device. Copies of blocks are queued, in order with the steps."""

    runs_ahead, needs_tokens = True, False

    def __init__(
        self,
        spec: ModelSpec,
        model: CudaModel,
        memory: StepMemory,
        host_pages: HostPages,
        facts: WorkerFacts,
        adapters: CudaAdapters | None = None,
        states: CudaStates | None = None,
    ) -> None:
        self.facts = facts
        self.states = states
        self._spec = spec
        self._model = model
        self.embedding, self.head, self.num_logits = model.embedding, model.head, model.num_logits
        self._memory = memory
        self._adapters = adapters
        if adapters is not None:
            adapters.take_room(memory.shape.max_tokens)
        self._host_pages = host_pages
        self._device = model.device
        self._graphs = StepGraphs(self._forward, self._choose, self._device)
        memory.rows.on_moved = self._graphs.clear
        self._copies: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._warm()

    def reset_blocks(self, block_ids: list[int]) -> None:
        """Does nothing: only the tokens of rows are ever read."""

    def copy_out(self, copies: list[tuple[int, int]]) -> None:
        self._host_pages.copy_out(copies)

    def copy_in(self, copies: list[tuple[int, int]]) -> None:
        self._host_pages.copy_in(copies)

    def load_adapter(self, slot: int, adapter: LoraAdapter) -> None:
        assert self._adapters is not None, "there are no slots for adapters"
        if self._copies is None:
            self._adapters.load(slot, adapter)
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._adapters.load(slot, adapter)
        stream.synchronize()

    def prefault(self) -> None:
        """Does nothing: the device's memory is allocated already."""

    @torch.inference_mode()
    def _warm(self) -> None:
        """Runs steps without sequences in every form that occurs, which compiles all kernels, and captures graphs."""
        with launches.warming():
            self._model.measure_products(self._memory.shape.max_tokens)
            for size in self._with_adapters(self._warm_sizes()):
                self._choose(size, self._forward(size))
            if self._model.can_be_captured:
                self._graphs.capture(self._with_adapters(graph_sizes(self._memory.shape, self._device)))

    def _with_adapters(self, sizes: Iterable[Size]) -> Iterator[Size]:
        """Yields sizes, and the same for steps with adapters if there are slots for any."""
        for size in sizes:
            yield size
            if self._adapters is not None:
                yield replace(size, adapted=True)

    def _warm_sizes(self) -> Iterator[Size]:
        """Yields sizes for steps of every form besides those of the graphs."""
        shape = self._memory.shape
        most, tokens, verified = shape.max_sequences, shape.max_tokens, shape.max_queries[-1]
        wanted = {number for number in (2, verified + 1, *self._model.changes()) if number <= tokens}
        if self._device.type == "cuda":
            wanted.add(tokens)  # which also allocates the memory of the largest step
            # ``prepare`` has a form for each power of 2.
            for sequences in {min(MIN_SEQUENCES << n, most) for n in range(12)}:
                yield Size(sequences, tokens, shape.max_sampled, tokens, commits=shape.commits_states)
        for number in sorted(wanted):
            yield Size(1, number, min(number, shape.max_sampled), number)
        if self.states is not None:
            yield Size(1, 1, 1, 1, commits=shape.commits_states)

    @torch.inference_mode()
    def start_step(self, batch: Batch) -> Finish:
        memory, size = self._memory, Size.of(batch)
        if self._adapters is not None and batch.adapters is not None:
            size = replace(size, adapted=True)
        reads_hidden = any(True for _ in batch.pooled_spans()) or any(True for _ in batch.prompt_spans())
        graph = None if reads_hidden else self._graphs.find(size)
        memory.rows.update(batch)
        memory.inputs.write(batch, graph or size, memory.rows)
        if self._adapters is not None and size.adapted:
            self._adapters.write(batch, graph or size)
        if self.states is not None:
            self.states.write(batch, graph or size)
        read = HiddenReads([], [])
        if graph:
            made = self._graphs.run(graph, lambda: self._await_masks(batch))
        else:
            made = self._forward(size)
            self._await_masks(batch)
            self._choose(size, made)
            read = HiddenReads.start(
                batch, made.states, self._wide_logits, self._spec.vocab_size, lambda tensor: self._to_host(tensor)[0]
            )
        features = None
        if batch.feature_layers:
            # A copy, since the next step overwrites it.
            features = DeviceFeatures.of(made.features[: size.tokens].flatten(1).clone())
        with_tops = any(row.sampling.logprobs is not None for row in batch.rows)
        # The last copy: the others are complete when it is.
        copied, ready = self._to_host(memory.outputs.snapshot(size.sampled, with_tops=with_tops))

        def finish() -> BatchResult:
            if ready is not None:
                ready.synchronize()
            sampled = memory.outputs.read(batch.sampled, copied.numpy(), memory.rows.num_top)
            return BatchResult(sampled, read.finish(), features)

        return finish

    def _to_host(self, snapshot: Tensor) -> tuple[Tensor, "torch.cuda.Event | None"]:
        """Copies a snapshot to the host while the next step computes. Returns the copy and the event of its end."""
        if self._copies is None:
            return snapshot, None
        host = torch.empty(snapshot.shape, dtype=snapshot.dtype, pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            host.copy_(snapshot, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        snapshot.record_stream(self._copies)
        return host, ready

    def _await_masks(self, batch: Batch) -> None:
        """Waits for masks, which may depend on tokens of the step before that another thread reads."""
        if batch.masks is not None:
            self._memory.rows.write_masks(batch.masks.words.result())
            self._memory.rows.drop_rows(batch.masks.late)
            if self.states is not None and batch.masks.late:
                self.states.drop_rows(batch, batch.masks.late)

    def _forward(self, size: Size) -> Hidden:
        """Launches the layers of a step of that size on the current inputs."""
        rows = self._memory.rows.rows
        step = self._memory.inputs.step(size)
        prepare(rows, step, PAGE_SLOTS, self._spec.vocab_size)
        if self._adapters is not None:
            self._adapters.launch(size)
        ragged = RaggedRows(rows.tables, step.rows, step.query_starts, step.contexts)
        windows = self._memory.places_in_windows(step)
        if self.states is None:
            return self._model.forward(step, ragged, size.longest, None, windows)
        sampled = self._memory.inputs.part("line_tokens", size.sampled) if size.commits else None
        row_states = RecurrentStep(self.states.rows(size, step), self.states.chunks(size), sampled, [])
        return self._model.forward(step, ragged, size.longest, row_states, windows)

    def _choose(self, size: Size, hidden: Hidden) -> None:
        """Launches the rest of the step: samples tokens, and advances rows by the tokens that they keep."""
        memory = self._memory
        rows, inputs, outputs = memory.rows, memory.inputs, memory.outputs
        kept = inputs.part("kept_before", size.sequences)
        last = outputs.part("last", size.sequences).fill_(-1)
        if size.sampled:
            logits = self._model.logits(hidden.states.index_select(0, inputs.part("line_tokens", size.sampled)))
            accepted = memory.sampler.choose(size, logits, inputs, rows, outputs, last)
            kept = torch.add(kept, accepted, out=outputs.part("kept", size.sequences))
        commit(rows.rows, inputs.step(size), kept, last)
        if self.states is not None and size.commits:
            self._model.commit_states(hidden.kept, self.states.kept_rows(size, inputs, kept))

    def _wide_logits(self, hidden: Tensor) -> Tensor:
        # A copy, since a part of the hidden states may start at an address that kernels cannot read from.
        return upcast(self._model.logits(hidden.clone()))


def unsupported_reason(config: WorkerConfig, info: CheckpointInfo) -> str | None:
    """Returns why this backend cannot run the model with this config, and a remedy; None if it can."""
    spec = info.spec
    if not config.device.startswith("cuda") and not interpreted():
        return f"--device is {config.device}, and this backend is for GPUs: give --device cuda, or leave --backend out"
    if config.device.startswith("cuda") and (reason := _unsupported_gpu(config, info)):
        return reason
    dtype = dtype_name_of(config, info)
    if dtype not in DTYPES:
        return f"--dtype is {config.dtype}, here {dtype}, and this backend has {', '.join(DTYPES)}: give one of them"
    rows = max((mixer.matrices[1] for mixer in spec.recurrent if mixer is not None), default=0)
    if rows > MAX_KEY_SIZE:
        return f"the states of its recurrent layers have {rows} rows, and this backend runs up to {MAX_KEY_SIZE}"
    if config.block_size != PAGE_SLOTS:
        return f"--block-size is {config.block_size}, and pages hold {PAGE_SLOTS} tokens: give that"
    if spec.latent is not None and (reason := _unsupported_latent(config, dtype, spec.latent)):
        return reason
    head_dims = {spec.at(layer).head_dim for layer in range(spec.num_layers)}
    widths = head_dims if spec.latent is None else {spec.latent.kv_lora_rank}
    for size in widths:
        if size % 8 or not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            return (
                f"its heads have {size} dimensions, and this backend runs multiples of 8 from {MIN_HEAD_DIM} to "
                f"{MAX_HEAD_DIM}"
            )
    if config.device.startswith("cuda") and (reason := _unsupported_width(config, dtype, max(widths), spec)):
        return reason
    if min(config.tokenizer_vocab_size or spec.vocab_size, spec.vocab_size) > MAX_VOCAB:
        return f"its vocabulary has {spec.vocab_size} tokens, and this backend samples from up to {MAX_VOCAB}"
    if config.kv_cache_dtype == "int8":
        return "--kv-cache-dtype int8: is for the CPU backend: give fp8, or leave it out"
    if config.kv_cache_dtype not in ("auto", dtype, *KV_DTYPES):
        return f"--kv-cache-dtype {config.kv_cache_dtype}: the activations are in {dtype}: give auto, {dtype} or fp8"
    return unsupported_attention(config, spec, dtype)


def _unsupported_latent(config: WorkerConfig, dtype: str, latent: LatentAttention) -> str | None:
    """Returns what of latent attention is not done."""
    rotated = latent.qk_rope_head_dim
    if rotated % 8 or rotated > MAX_ROTATED_DIM:
        return f"qk_rope_head_dim is {rotated}, and this backend runs multiples of 8 up to {MAX_ROTATED_DIM}"
    if config.deterministic:
        return "--deterministic: is not for latent attention, whose products torch computes: leave it out"
    if config.kv_cache_dtype == "fp8":
        return f"--kv-cache-dtype fp8: is not for latent attention: give auto or {dtype}"
    if config.speculation is not None and config.speculation.method is DraftMethod.MTP:
        return "--speculative-config mtp: this backend has no heads with latent attention: give another method"
    return None


def _unsupported_width(config: WorkerConfig, dtype: str, size: int, spec: ModelSpec) -> str | None:
    """Returns why the GPU cannot run heads or latents of up to ``size`` dimensions; None if it can."""
    if dtype != "float32" or size <= WIDE_DIM:
        return None
    name, needed = ("heads", WIDE_HEAD_BYTES) if spec.latent is None else ("latents", WIDE_LATENT_BYTES)
    found = shared_bytes_of(torch_device(config.device))
    if found >= needed:
        return None
    return (
        f"--dtype is {config.dtype}, here {dtype}, and {name} of {size} dimensions then need {needed >> 10} KiB of "
        f"shared memory, of which this GPU has {found >> 10}: give --dtype bfloat16"
    )


def _unsupported_gpu(config: WorkerConfig, info: CheckpointInfo) -> str | None:
    capability = capability_of(torch_device(config.device))
    if capability < MIN_CAPABILITY:
        return (
            f"its kernels need a GPU of compute capability {_version(MIN_CAPABILITY)} (Ampere) or later, and this one "
            f"has {_version(capability)}"
        )
    if capability >= FP8_CAPABILITY:
        return None
    needs = f"needs a GPU of compute capability {_version(FP8_CAPABILITY)} (Ada) or later, and this one has "
    if config.kv_cache_dtype == "fp8":
        return f"--kv-cache-dtype fp8 {needs}{_version(capability)}: leave it out"
    if info.at_load(config.quantization) == "fp8":
        return f"--quantization fp8 {needs}{_version(capability)}: give int8 or int4"
    if any(linear.scheme.is_float and linear.scheme.bits == 8 for linear in info.quantized.values()):
        return f"the checkpoint is quantised to fp8, which {needs}{_version(capability)}"
    return None


def _version(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def load(config: WorkerConfig, info: CheckpointInfo) -> Backend:
    """The factory for the backend registry. Raises ModelError."""
    if config.pipeline_parallel_size > 1:
        return load_first_stage(config, info.spec, lambda: CudaLoading(config, info))
    loading = CudaLoading(config, info)
    loading.load_weights(None)
    return CudaBackend(loading.spec, *loading.whole_model(loading.cache_sizes()))


def load_stage(config: WorkerConfig, info: CheckpointInfo) -> StageRank:
    """The factory of ranks that only compute layers; ``unsupported_reason`` must be None. Raises ModelError and
    PeerLost."""
    return load_later_stage(config, lambda: CudaLoading(config, info))

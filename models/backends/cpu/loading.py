"""Loads a model, or a stage's part of one, for the CPU library: its weights, its KV pages and its facts."""

import logging
import math

from penstock.kernels.cpu.bindings import LANES, StorageFormat, find_kernels
from penstock.kernels.cpu.program import Library, Memory
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.base import context_of, shared_facts
from penstock.models.backends.cpu.adapters import CpuAdapters, adapter_bytes
from penstock.models.backends.cpu.machine_limits import READ_BYTES, measure_limits
from penstock.models.backends.cpu.model import CpuModel, load_model
from penstock.models.backends.cpu.recurrent import slot_floats
from penstock.models.backends.cpu.sizes import StorageFormats, block_bytes, max_weight_bytes
from penstock.models.backends.cpu.stage_limits import arithmetic
from penstock.models.backends.cpu.weights import DummyTensors, FileTensors, Tensors, is_kept
from penstock.models.backends.kv_groups import divide_layers
from penstock.models.backends.memory import (
    CacheSizes,
    allocated,
    cache_sizes,
    check_adapters_fit,
    check_weights_fit,
)
from penstock.models.backends.pipeline_parallel import ModelPart, PartWork, StageSpeed, work_of
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.errors import ModelError
from penstock.scheduler.worker_config import WorkerConfig, WorkerFacts

logger = logging.getLogger(__name__)

DTYPES = {"float32": StorageFormat.F32, "bfloat16": StorageFormat.BF16}

NARROW = {"float16": "bfloat16", "float64": "float32"}
"""What ``auto`` chooses for a checkpoint in another dtype."""

STEP_S = 0.15
OPERATIONS_PER_S = {"amx": 800e9, "neon_bf16": 100e9, "neon_dot": 40e9, "neon": 20e9}
"""The approximate speed of a thread by instruction set: an order of magnitude is enough. Those of Arm are computed from
the registers and the clock of typical processors, not measured."""
OTHER_OPERATIONS_PER_S = 250e9
"""The same for any other instruction set."""
INTEGER_OPERATIONS_PER_S = {"amx": 1600e9, "avx512_bf16": 500e9, "avx512_vnni": 500e9}
"""The same for products with integer weights, where they are faster. Measured for avx512_vnni only."""
MIN_BATCHED_TOKENS = 64
"""Products of fewer rows are slower, and each decoding row needs one row."""
MOST_BATCHED_TOKENS = 256
"""Products of more rows are not faster."""

TILE_TOKENS = 32
"""Products are computed in tiles of this many rows, or a part of one."""

LEAST_READ_BYTES = 64 << 20
"""The least memory that is read to measure a stage's speed."""


class ModelLoading:
    """One process's share of loading a model: first the weights of its part, then the pages for the blocks that every
    process has room for."""

    def __init__(self, config: WorkerConfig, info: CheckpointInfo) -> None:
        """``unsupported_reason`` must be None. Starts the threads that pack weights. Raises ModelError."""
        self.config, self.info, self.spec = config, info, info.spec
        self.dtype = NARROW.get(info.dtype, info.dtype) if config.dtype == "auto" else config.dtype
        if self.dtype != info.dtype and config.dtype == "auto":
            logger.info("the checkpoint is in %s, which this backend computes in %s", info.dtype, self.dtype)
        self.quantization = info.choose_quantization(config.quantization)
        if self.quantization == "none" and info.is_eight_bit:
            self.quantization = "int8"
            logger.info("the weights are stored in eight bits, with a scale for 32 columns; int8 has one for each row")
        if config.host_kv_cache_bytes:
            raise ModelError(
                "--host-kv-cache-bytes: on a CPU the KV cache is in host memory already, and copies gain nothing: give "
                "these bytes to --kv-cache-memory-bytes"
            )
        self.formats = _formats(config, info, self.dtype, self.quantization)
        self.max_model_len = context_of(config, self.spec)
        self.groups = divide_layers(config, self.spec)
        self.state_bytes = 4 * slot_floats(self.spec)
        kernels = find_kernels()
        assert kernels is not None, "every machine runs the generic kernels"
        self.kernels = kernels
        self.library = _start_threads(config)

    def load_weights(self, part: ModelPart) -> CpuModel:
        """Packs the weights of a part. Raises ModelError."""
        spec, config = self.spec, self.config
        max_bytes = max_weight_bytes(spec, self.formats, self.info.quantized, self.kernels, part)
        stored = self.dtype if self.quantization == "none" else self.quantization
        check_weights_fit(config, spec.architecture, max_bytes, stored)
        num_logits = min(config.tokenizer_vocab_size or spec.vocab_size, spec.vocab_size)
        tensors: Tensors = DummyTensors() if config.load_format == "dummy" else FileTensors(self.info)
        try:
            model = load_model(
                spec, self.formats, tensors, self.library, self.kernels, max_bytes, num_logits, config.block_size,
                part, self.groups,
            )  # fmt: skip
        except MemoryError as error:
            raise ModelError(
                f"{spec.architecture}: its weights of {max_bytes >> 20} MiB cannot be allocated on cpu: choose a "
                "smaller --dtype, --quantization int8 or int4 or a smaller model, or raise the process's limit "
                "(ulimit -v)"
            ) from error
        if not math.isfinite(model.error.squared_weights):
            raise ModelError(f"{spec.architecture}: a weight is not a finite number: download the weights again")
        if model.error.squared_weights:
            logger.info("%s: the weights' relative error is %.2f %%", self.quantization, 100 * model.error.relative)
        return model

    def allocate_adapters(self) -> CpuAdapters:
        """Allocates the slots of LoRA adapters, in the dtype of the model's floats. Raises ModelError."""
        config = self.config
        slots = (self.kernels, self.spec, DTYPES[self.dtype], config.max_loras, config.max_lora_rank)
        check_adapters_fit(config, adapter_bytes(*slots))
        try:
            return CpuAdapters(self.library, *slots)
        except MemoryError as error:
            raise ModelError("--max-loras: memory for the adapters cannot be allocated on cpu: give less") from error

    def cache_sizes(self, part: ModelPart) -> CacheSizes:
        """Returns how many KV blocks and recurrent states this process has room for, once its weights are loaded.
        Raises ModelError."""
        groups = self.groups.in_blocks(self.config)
        return cache_sizes(self.config, self._block_bytes(part), self.state_bytes, self.max_model_len, groups=groups)

    def allocate_pages(self, part: ModelPart, num_blocks: int) -> Memory:
        """Allocates the KV pages of a part's layers. Raises ModelError."""
        with allocated(num_blocks, "cpu"):
            # A page belongs to whichever row comes, and any thread may read it, so pages alternate between nodes: then
            # no node's memory is read more than another's. A page has 16 tokens of all heads, and memory is placed in
            # units of 4 KiB or 2 MiB, so heads cannot be placed one by one.
            return self.library.shared_memory(num_blocks * self._block_bytes(part))

    def allocate_states(self, num_slots: int) -> Memory | None:
        """Allocates the slots of recurrent states, if the model has any. Raises ModelError."""
        if not num_slots:
            return None
        with allocated(num_slots, "cpu"):
            return self.library.shared_memory(num_slots * self.state_bytes)

    def facts(
        self,
        part: ModelPart,
        weight_bytes: int,
        num_blocks: int,
        stage_layers: tuple[int, ...] = (),
        num_state_slots: int = 0,
    ) -> WorkerFacts:
        """Returns the facts of this process."""
        instruction_set = self.kernels.name.decode()
        quantized = self.info.quantized.values()
        has_integers = self.quantization in ("int8", "int4") or any(is_kept(each.scheme) for each in quantized)
        budget = _default_budget(self.spec, instruction_set, self.config.num_threads, has_integers=has_integers)
        return WorkerFacts(
            **shared_facts(self.config, self.info, num_blocks, budget, num_state_slots, self.groups),
            state_bytes=self.state_bytes,
            backend="cpu",
            dtype=self.dtype,
            kv_cache_dtype="int8" if self.formats.kv is StorageFormat.INT8 else self.dtype,
            quantization=self.quantization,
            kv_bytes=num_blocks * self._block_bytes(part),
            weight_bytes=weight_bytes,
            num_threads=self.config.num_threads,
            instruction_set=instruction_set,
            stage_layers=stage_layers,
        )

    def measure_speed(self) -> StageSpeed:
        """Measures what the threads do at best, in about a second. They read as much memory as the model's weights,
        which may fit into caches."""
        whole = max_weight_bytes(self.spec, self.formats, self.info.quantized, self.kernels)
        read_bytes = min(READ_BYTES, max(LEAST_READ_BYTES, whole))
        limits = measure_limits(self.library, self.kernels, [self.formats.weights], read_bytes)
        return StageSpeed(limits.bytes_per_s, limits.operations_per_s[arithmetic(self.formats.weights)])

    def work(self) -> tuple[list[PartWork], PartWork]:
        """Returns what a step does with each layer, and with the head."""
        spec = self.spec
        sizes = [
            max_weight_bytes(
                spec, self.formats, self.info.quantized, self.kernels, ModelPart(range(layer, layer + 1), False)
            )
            for layer in range(spec.num_layers)
        ]
        head_parameters = spec.vocab_size * spec.hidden_size
        panel_bytes = int(self.kernels.panel_bytes(self.formats.head, spec.hidden_size, 0))
        return work_of(spec, sizes), PartWork(panel_bytes * spec.vocab_size / LANES, head_parameters)

    def _block_bytes(self, part: ModelPart) -> int:
        return block_bytes(self.spec, self.formats.kv, self.config.block_size, part, self.groups)


def _start_threads(config: WorkerConfig) -> Library:
    if nodes := sorted(set(config.thread_nodes)):
        logger.info("threads and weights are divided among the NUMA nodes %s", ", ".join(map(str, nodes)))
    if config.thread_cpus and all(len(cpus) == 1 for cpus in config.thread_cpus):
        pinned = ", ".join(str(cpu) for (cpu,) in config.thread_cpus)
        logger.info("each compute thread is pinned to a core of its own, of %s", pinned)
    return Library(config.num_threads, cpus=config.thread_cpus, nodes=config.thread_nodes)


def _default_budget(spec: ModelSpec, instruction_set: str, num_threads: int, *, has_integers: bool) -> int:
    """Returns the tokens that a step computes in about ``STEP_S``. A new request waits this long, and products are
    nearly as fast as with more tokens. ``has_integers``: whether weights are integers."""
    looked_up = spec.vocab_size * spec.hidden_size
    if spec.layer_inputs is not None:
        looked_up += spec.layer_inputs.vocab_size * spec.layer_inputs.size * spec.num_layers
    per_token = 2 * max(1, spec.num_parameters - looked_up)
    per_s = OPERATIONS_PER_S.get(instruction_set, OTHER_OPERATIONS_PER_S)
    if has_integers:
        per_s = INTEGER_OPERATIONS_PER_S.get(instruction_set, per_s)
    tokens = STEP_S * per_s * num_threads / per_token
    return min(MOST_BATCHED_TOKENS, max(MIN_BATCHED_TOKENS, TILE_TOKENS * math.ceil(tokens / TILE_TOKENS)))


def _formats(config: WorkerConfig, info: CheckpointInfo, dtype: str, quantization: str) -> StorageFormats:
    plain = DTYPES[dtype]
    weights = {"int8": StorageFormat.INT8, "int4": StorageFormat.INT4}.get(quantization, plain)
    # The head decides between tokens with close logits, so it keeps eight bits even if the layers have four.
    head = StorageFormat.INT8 if quantization in ("int8", "int4") else plain
    return StorageFormats(weights, head, plain, kv_format(config, info, dtype))


def kv_format(config: WorkerConfig, info: CheckpointInfo, dtype: str) -> StorageFormat:
    """Returns the type of the KV cache of a model with activations in ``dtype``. Raises ModelError.

    Where this backend quantises the weights, ``auto`` is int8: that adds little to their error, and attention reads
    half the bytes. Latents are not quantised.
    """
    wanted = config.kv_cache_dtype
    if wanted not in ("auto", "int8", dtype):
        why = "is for the backend cuda" if wanted == "fp8" else f"the activations are in {dtype}"
        raise ModelError(f"--kv-cache-dtype {wanted}: {why}: give auto, {dtype} or int8")
    if info.spec.latent is not None:
        if wanted == "int8":
            raise ModelError(f"--kv-cache-dtype int8: is not for latent attention: give auto or {dtype}")
        return DTYPES[dtype]
    is_int8 = wanted == "int8" or (wanted == "auto" and info.at_load(config.quantization) is not None)
    return StorageFormat.INT8 if is_int8 else DTYPES[dtype]

"""Loads a model, or a rank's part of one, onto a GPU: its weights, the memory of steps, its KV pages and its facts."""

import logging
import math
from collections.abc import Sequence

import torch

from penstock.kernels.cuda.attention.common import PAGE_SLOTS
from penstock.kernels.cuda.model_shapes import ModelShape
from penstock.models.backends.base import context_of, shared_facts
from penstock.models.backends.cuda.adapters import CudaAdapters
from penstock.models.backends.cuda.attention_libraries import make_attention
from penstock.models.backends.cuda.linear import CudaLinears, stored_bytes
from penstock.models.backends.cuda.model import CudaModel
from penstock.models.backends.cuda.pages import DevicePages, read_kv_scales
from penstock.models.backends.cuda.recurrent import RecurrentLayers
from penstock.models.backends.cuda.shapes import max_drafts, shape_of
from penstock.models.backends.cuda.stages import CudaStage
from penstock.models.backends.cuda.steps.rows import CudaRows
from penstock.models.backends.cuda.steps.sampler import CudaSampler
from penstock.models.backends.cuda.steps.states import CudaStates, slot_floats
from penstock.models.backends.cuda.steps.step_io import StepInputs, StepOutputs
from penstock.models.backends.distributed import join
from penstock.models.backends.memory import CacheSizes, allocated, cache_sizes, check_weights_fit
from penstock.models.backends.pipeline_parallel import ModelPart, PartWork, StageSpeed
from penstock.models.backends.torch_common.adapters import add_slots
from penstock.models.backends.torch_common.device import torch_device
from penstock.models.backends.torch_common.fp4_experts import has_fp4_experts, stored_fp4_bytes
from penstock.models.backends.torch_common.host_pages import HostPages, take_host_pages
from penstock.models.backends.torch_common.loader import load_weights
from penstock.models.backends.torch_common.stages import TorchPart, measure_rank_speed, num_loaded, rank_work
from penstock.models.backends.torch_common.weights import Weights
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.scheduler.worker_config import MAX_BATCHED_TOKENS, WorkerConfig, WorkerFacts

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {"fp8": torch.float8_e4m3fn}
"""The dtypes of the KV cache besides that of the activations."""


class StepMemory:
    """The memory of steps besides weights and pages, allocated before the KV cache gets the rest."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self.shape = shape
        self.sampler = CudaSampler(shape.sampler(), shape.max_sampled, device)
        self.rows = CudaRows(shape, device)
        self.inputs = StepInputs(shape.max_sequences, shape.max_tokens, shape.max_sampled, device)
        self.outputs = StepOutputs(shape.max_sequences, shape.max_sampled, device)


def dtype_name_of(config: WorkerConfig, info: CheckpointInfo) -> str:
    """Returns the name of the dtype of the activations."""
    return info.dtype if config.dtype == "auto" else config.dtype


class CudaLoading:
    """Loads a rank's part of a model, in stages (``StageLoading``) or not."""

    def __init__(self, config: WorkerConfig, info: CheckpointInfo) -> None:
        """Waits for the ranks that share the matrices. Raises ModelError and PeerLost."""
        self.config, self._info = config, info
        self.spec = info.spec.divided(config.tensor_parallel_size)
        self._dtype_name = dtype_name_of(config, info)
        self._dtype, self._device = DTYPES[self._dtype_name], torch_device(config.device)
        if self._device.index is not None:
            torch.cuda.set_device(self._device)
        self._max_model_len = context_of(config, self.spec)
        self._quantization = info.choose_quantization(config.quantization)
        self._parallel = join(config)
        self._num_logits = min(config.tokenizer_vocab_size or self.spec.vocab_size, self.spec.vocab_size)
        self._state_bytes = 4 * slot_floats(self.spec)
        self._kv_dtype = KV_DTYPES.get(config.kv_cache_dtype, self._dtype)
        self._keeps_fp4 = has_fp4_experts(info, self._parallel.size)
        at_load = info.at_load(config.quantization)
        self._linears = CudaLinears(info, at_load, self._device, deterministic=config.deterministic)
        self._part: ModelPart | None = None
        self._weights: Weights | None = None
        self._adapters: CudaAdapters | None = None
        self._shape: ModelShape | None = None
        self._memory: StepMemory | None = None

    def measure_speed(self) -> StageSpeed:
        return measure_rank_speed(self._dtype, self._device, self._weight_bytes(None))

    def work(self) -> tuple[list[PartWork], PartWork]:
        return rank_work(self.spec, self._num_logits, self._dtype.itemsize, self._weight_bytes)

    def load_weights(self, part: ModelPart | None) -> None:
        """Loads the weights; ``part``: only these, in stages. Raises ModelError."""
        config, info = self.config, self._info
        wanted = self._dtype_name if self._quantization == "none" else self._quantization
        check_weights_fit(config, self.spec.architecture, self._weight_bytes(part), wanted, self._parallel)
        self._part = part
        weights = load_weights(
            info, self._dtype, self._device, config.load_format, self._num_logits, self._parallel, self._linears.make,
            keeps_fp4=self._keeps_fp4, part=part,
        )  # fmt: skip
        at_load = info.at_load(config.quantization)
        if at_load is not None:
            logger.info("%s: the weights' relative error is %.2f %%", at_load, 100 * self._linears.error.relative)
        self._weights, self._adapters = add_slots(CudaAdapters, config, self.spec, weights, self._dtype, self._device)

    def num_blocks(self) -> int:
        return self.cache_sizes().num_blocks

    def cache_sizes(self) -> CacheSizes:
        """Allocates the memory of steps, and returns how many KV blocks and recurrent states there is room for. Raises
        ModelError."""
        config = self.config
        # The memory of steps depends on the context, which depends on what that memory leaves to the KV cache.
        most_blocks = self._cache_sizes(self._max_model_len).num_blocks
        max_model_len = context_of(config, self.spec, most_blocks)
        self._shape = shape_of(
            self.spec,
            self._dtype,
            self._kv_dtype,
            self._num_logits,
            max_model_len,
            config.max_num_seqs,
            # The runner warms up with a row of one block.
            max(config.max_num_batched_tokens or MAX_BATCHED_TOKENS, config.max_num_seqs, PAGE_SLOTS),
            deterministic=config.deterministic,
            max_drafts=max_drafts(config),
            has_fp4_experts=self._keeps_fp4,
        )
        if self._part is None:
            self._memory = StepMemory(self._shape, self._device)
        self._linears.take_room(self._dtype, self._shape.max_tokens)
        num_blocks, num_slots = self._cache_sizes(max_model_len)
        return CacheSizes(min(most_blocks, num_blocks), num_slots)

    def _cache_sizes(self, max_model_len: int) -> CacheSizes:
        return cache_sizes(self.config, self._block_bytes(), self._state_bytes, max_model_len, parallel=self._parallel)

    def whole_model(
        self, sizes: CacheSizes
    ) -> tuple[CudaModel, StepMemory, HostPages, WorkerFacts, CudaAdapters | None, CudaStates | None]:
        """Allocates the pages and the recurrent states of a model without stages. Raises ModelError."""
        assert self._memory is not None, "the memory of steps comes first"
        num_blocks, num_slots = sizes
        states: CudaStates | None = None
        if num_slots:
            shape = self._memory.shape
            with allocated(num_blocks, self._device):
                states = CudaStates(self.spec, num_slots, shape.max_sequences, shape.max_tokens, self._device)
        model, host_pages, facts = self._model(num_blocks, (), num_slots, states)
        return model, self._memory, host_pages, facts, self._adapters, states

    def first_part(self, num_blocks: int, layers: Sequence[int]) -> TorchPart:
        assert self._shape is not None, "the memory of steps comes first"
        model, _, facts = self._model(num_blocks, layers)
        has_ends = self._part is not None and self._part.has_ends
        return TorchPart(CudaStage(model, self._shape, facts, has_ends=has_ends), self._dtype, self._device)

    layer_part = first_part

    def _model(
        self, num_blocks: int, layers: Sequence[int], num_slots: int = 0, states: CudaStates | None = None
    ) -> tuple[CudaModel, HostPages, WorkerFacts]:
        config, info, weights, part = self.config, self._info, self._weights, self._part
        assert weights is not None, "the weights come first"
        assert self._shape is not None, "the memory of steps comes first"
        with allocated(num_blocks, self._device):
            numbers = None if part is None else part.layers
            pages = DevicePages.allocate(self.spec, num_blocks, self._kv_dtype, self._device, numbers)
        host_pages = take_host_pages(config, pages.by_block, self._block_bytes(), pages.num_bytes)
        facts = WorkerFacts(
            **shared_facts(config, info, num_blocks, MAX_BATCHED_TOKENS, num_slots),
            state_bytes=self._state_bytes,
            backend="cuda",
            dtype=self._dtype_name,
            kv_cache_dtype=config.kv_cache_dtype if config.kv_cache_dtype in KV_DTYPES else self._dtype_name,
            quantization=self._quantization,
            kv_bytes=pages.num_bytes,
            weight_bytes=weights.num_bytes,
            num_host_blocks=host_pages.num_slots,
            copy_us_per_block=host_pages.measure_copy_us(),
            stage_layers=tuple(layers),
        )
        kv_scales = None
        if self._kv_dtype == torch.float8_e4m3fn:
            of_layers = read_kv_scales(info, self._parallel, self._device)
            kv_scales = of_layers if part is None else of_layers[part.layers.start : part.layers.stop]
        attention = make_attention(config.attention_backend, self._shape, self._device)
        recurrent: RecurrentLayers | None = None
        if states is not None:
            recurrent = RecurrentLayers(self.spec, weights.layers, states.layers, self._shape, states.stride)
        model = CudaModel(
            self.spec, weights, pages.of_layers, self._shape, self._parallel, self._linears, attention,
            config.feature_layers, kv_scales, part, recurrent,
        )  # fmt: skip
        return model, host_pages, facts

    def _block_bytes(self) -> int:
        layers = None if self._part is None else self._part.layers
        return self.spec.kv_bytes_per_token(self._kv_dtype.itemsize, layers) * PAGE_SLOTS

    def _weight_bytes(self, part: ModelPart | None) -> int:
        return weight_bytes(self.config, self._info, self._num_logits, self._dtype, part)


def weight_bytes(
    config: WorkerConfig, info: CheckpointInfo, num_logits: int, dtype: torch.dtype, part: ModelPart | None = None
) -> int:
    """Returns the approximate size of a rank's weights; ``part``: of these. Embedding, head, routers and experts are
    not quantised, except experts in MXFP4."""
    spec, at_load = info.spec.divided(config.tensor_parallel_size), info.at_load(config.quantization)
    number = spec.num_loaded(num_logits, config.tensor_parallel_size)
    total = dtype.itemsize * (number if part is None else num_loaded(spec, num_logits, part))
    keeps_fp4 = has_fp4_experts(info, config.tensor_parallel_size)
    for name, shape in spec.tensors():
        if part is not None and not part.has(name):
            continue
        if keeps_fp4 and len(shape) == 2 and ".experts." in name:
            total += stored_fp4_bytes(*shape) - math.prod(shape) * dtype.itemsize
        elif len(shape) == 2 and "_proj." in name and ".experts." not in name:
            # A rank's part of a quantised checkpoint is dequantised.
            linear = info.quantized.get(name.removesuffix(".weight")) if config.tensor_parallel_size == 1 else None
            stored = stored_bytes(*shape, at_load, None if linear is None else linear.scheme)
            if stored is not None:
                total += stored - math.prod(shape) * dtype.itemsize
    return total

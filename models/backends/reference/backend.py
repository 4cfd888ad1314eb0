"""The plain torch backend: every model, any device, float32, bfloat16, float16 and float64. The other backends are
compared with it. It is as fast as torch's own operations allow without compilation."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.reference.ops import rotate, soft_cap
from penstock.kernels.reference.upcast import upcast
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.base import Backend, context_of, shared_facts
from penstock.models.backends.distributed import join
from penstock.models.backends.first_stage import load_first_stage
from penstock.models.backends.kv_groups import KvGroups, divide_layers, one_group
from penstock.models.backends.later_stage import StageRank, load_later_stage
from penstock.models.backends.memory import CacheSizes, allocated, cache_sizes, check_weights_fit
from penstock.models.backends.pipeline_parallel import ModelPart, PartWork, StageSpeed
from penstock.models.backends.reference.attention_groups import AttentionGroup, attention_groups, grouped_attention
from penstock.models.backends.reference.latent_attention import attend_to_latents
from penstock.models.backends.stage_part import StageRows
from penstock.models.backends.tensor_parallel import ALONE, TensorParallel
from penstock.models.backends.torch_common.adapters import TorchAdapters, add_slots
from penstock.models.backends.torch_common.device import choose_dtype
from penstock.models.backends.torch_common.host_pages import HostPages, take_host_pages
from penstock.models.backends.torch_common.kv_pages import KVPages
from penstock.models.backends.torch_common.loader import load_weights
from penstock.models.backends.torch_common.paged_backend import PagedBackend
from penstock.models.backends.torch_common.recurrent import StateSlots
from penstock.models.backends.torch_common.rope_tables import cos_sin_tables, query_scales
from penstock.models.backends.torch_common.stages import TorchPart, measure_rank_speed, num_loaded, rank_work
from penstock.models.backends.torch_common.weights import (
    LayerWeights,
    MlpBesideExperts,
    Weights,
    scale_of_embeddings,
    unchanged,
)
from penstock.models.batch.batch import Batch
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.checkpoint.lora.adapter import LoraAdapter
from penstock.models.errors import ModelError
from penstock.scheduler.worker_config import MAX_BATCHED_TOKENS, WorkerConfig, WorkerFacts

logger = logging.getLogger(__name__)

SMALL_MODEL = 1 << 27
"""The limit in parameters. Several threads read a larger model's weights faster."""
SMALL_STEP = 1 << 31
"""The limit in parameters times tokens. In a smaller step of a small model, a second thread gains less than it costs
the service's loop, with which it shares the cores."""


class ReferenceBackend(PagedBackend):
    """A ``Backend`` of plain torch operations."""

    states: StateSlots | None

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        pages: KVPages,
        host_pages: HostPages,
        facts: WorkerFacts,
        num_threads: int,
        num_logits: int,
        parallel: TensorParallel,
        states: StateSlots | None = None,
        adapters: TorchAdapters | None = None,
        part: ModelPart | None = None,
        groups: KvGroups | None = None,
    ) -> None:
        """``spec``, ``weights`` and ``pages`` are the rank's. ``part``: its part of a model in stages, where rank 0 has
        the whole head. ``weights`` add ``adapters``, if there are any. ``groups``: the layers', by default one."""
        super().__init__(pages, host_pages, spec.vocab_size)
        self.facts = facts
        self._num_threads = num_threads
        self.num_logits = num_logits
        self._parallel = parallel
        self._head_parallel = parallel if part is None else ALONE
        self._layers = range(spec.num_layers) if part is None else part.layers
        self.states = states
        self._adapters = adapters
        self._small_step = SMALL_STEP // spec.num_parameters if spec.num_parameters < SMALL_MODEL else 0
        self._spec = spec
        self._groups = groups or one_group(spec)
        self._weights = weights
        self.embedding, self.head = weights.embedding, weights.head
        self._specs = [spec.at(layer) for layer in range(spec.num_layers)]
        """The spec with each layer's sizes."""
        self._rotations = spec.rotations
        self._cos_sin_tables = {
            (rope, rotary_dim): cos_sin_tables(rope, rotary_dim, facts.max_model_len, pages.device)
            for rope, rotary_dim in set(self._rotations)
        }

    def load_adapter(self, slot: int, adapter: LoraAdapter) -> None:
        assert self._adapters is not None, "there are no slots for adapters"
        self._adapters.load(slot, adapter)

    def forward(self, batch: Batch, features: list[Tensor]) -> Tensor:
        if self._adapters is not None:
            self._adapters.select(batch)
        self._choose_threads(len(batch.token_ids))
        x = self.embed(batch)
        weights = self._weights
        inputs = None if weights.layer_inputs is None else weights.layer_inputs(self._token_ids(batch), x)
        x = self.final_norm(self._run_layers(batch, x, inputs, batch.feature_layers, features))
        if self._spec.num_layers in batch.feature_layers:
            features.append(x)
        return x

    def embed(self, batch: Batch) -> Tensor:
        """Returns the input of the first layer, (T, hidden)."""
        spec, weights = self._spec, self._weights
        x = functional.embedding(self._token_ids(batch), weights.embedding)
        x = x * scale_of_embeddings(spec, x.dtype)
        if spec.position_table is not None and weights.positions is not None:
            positions = torch.from_numpy(batch.positions).to(self._device)
            x = x + functional.embedding(positions + spec.position_table.offset, weights.positions)
        return x

    def run_layers(self, rows: Batch | StageRows, x: Tensor) -> Tensor:
        """See ``StageDecoder``."""
        self._choose_threads(len(x))
        return self._run_layers(rows, x, None, (), [])

    def final_norm(self, x: Tensor) -> Tensor:
        """(N, hidden) -> (N, hidden)."""
        self._choose_threads(len(x))  # each thread has a number of its own
        return self._weights.norm(x)

    def _choose_threads(self, num_tokens: int) -> None:
        torch.set_num_threads(1 if num_tokens <= self._small_step else self._num_threads)

    def _token_ids(self, batch: Batch) -> Tensor:
        # Ids were checked at admission, but an id out of range must never become an address.
        return torch.from_numpy(batch.token_ids).to(self._device).clamp(0, self._spec.vocab_size - 1)

    def _run_layers(
        self,
        batch: Batch | StageRows,
        x: Tensor,
        inputs: Tensor | None,
        feature_layers: tuple[int, ...],
        features: list[Tensor],
    ) -> Tensor:
        """Runs the rank's layers on (T, hidden). ``inputs``, (T, layers, size), are those that layers have of their
        own."""
        spec, weights = self._spec, self._weights
        positions = torch.from_numpy(batch.positions).to(self._device)
        slots = self._slots(batch)
        turns = {key: (cos[positions], sin[positions]) for key, (cos, sin) in self._cos_sin_tables.items()}
        kinds = list(zip(self._groups.of_layers, spec.windows, strict=True))
        groups = {kind: self._attention_groups(batch, *kind) for kind in set(kinds)}
        query_scale = None if spec.query_scaling is None else query_scales(spec.query_scaling, positions)
        if self.states is not None:
            self.states.forget_step()
        for index, layer in zip(self._layers, weights.layers, strict=True):
            if index in feature_layers:
                features.append(x)
            before = layer.before_attention(x)
            sizes = self._specs[index]
            mixed = None
            if layer.recurrent is not None and self.states is not None:
                assert isinstance(batch, Batch), "a model with recurrent layers is not divided into stages"
                mixed = self.states.mix(index, layer.recurrent, before, batch)
            if spec.attends(index):
                turned, seen, written = turns[self._rotations[index]], groups[kinds[index]], slots[kinds[index][0]]
                attended = attend(sizes, self._pages, index, layer, before, turned, written, seen, query_scale)
                mixed = attended if mixed is None else mixed + attended
            if mixed is None:
                mixed = torch.zeros_like(x)
            if spec.is_parallel:
                both = mixed + layer.mlp(before if layer.before_mlp is unchanged else layer.before_mlp(x))
                self._parallel.all_reduce(both)
                x = x + both
                continue
            self._parallel.all_reduce(mixed)
            x = x + layer.after_attention(mixed)
            gated = layer.mlp(layer.before_mlp(x))
            if not isinstance(layer.mlp, MlpBesideExperts):
                self._parallel.all_reduce(gated)
            x = x + layer.after_mlp(gated)
            if layer.inputs is not None and inputs is not None:
                x = layer.inputs(x, inputs[:, index])
            if layer.scalar is not None:
                x = x * layer.scalar
        return x

    def _attention_groups(self, batch: Batch | StageRows, group: int, window: int | None) -> list[AttentionGroup]:
        """Returns the groups of rows for layers with this window, whose blocks are those of a group of layers."""
        pages, chunked = self._pages, self._spec.chunked_windows
        tables = batch.tables
        if group:
            assert isinstance(batch, Batch), "a model in stages has one group"
            tables = batch.window_tables[group - 1]
        return attention_groups(
            batch, window, pages.num_blocks, pages.block_size, self._device, chunked=chunked, tables=tables
        )

    def _slots(self, batch: Batch | StageRows) -> list[Tensor]:
        """Returns where each token's KV is written in the layers of each group, (T,)."""
        slots = [batch.slots]
        if self._groups.num_windowed:
            assert isinstance(batch, Batch), "a model in stages has one group"
            slots += batch.window_slots
        return [torch.from_numpy(each).to(self._device) for each in slots]

    def logits(self, hidden: Tensor) -> Tensor:
        logits = upcast(self._head_parallel.gather_columns(self._weights.head(hidden), self.num_logits))
        logits = logits * self._spec.logit_scale
        return logits if self._spec.logit_soft_cap is None else soft_cap(logits, self._spec.logit_soft_cap)


def attend(
    spec: ModelSpec,
    pages: KVPages,
    index: int,
    layer: LayerWeights,
    x: Tensor,
    rotation: tuple[Tensor, Tensor],
    slots: Tensor,
    groups: list[AttentionGroup],
    query_scale: Tensor | None = None,
) -> Tensor:
    """Computes one layer's attention and output projection, (T, hidden) -> (T, hidden): this rank's part of the sum.
    Writes the KV of every token if the layer has its own. ``spec`` has the layer's sizes. ``query_scale`` (T,) is a
    factor of each token's queries, where the layer has one."""
    if layer.latent is not None:
        return attend_to_latents(spec, pages, index, layer, layer.latent, x, rotation, slots, groups)
    has_kv = spec.has_kv(index)
    rotated = spec.query_size + (spec.kv_size if has_kv else 0)
    qkv = layer.qkv(x)
    if spec.gated_attention:
        qkv, gate = qkv[:, : -spec.query_size], qkv[:, -spec.query_size :]
    heads = qkv[:, :rotated] if spec.qk_norm_is_last else layer.qk_norm(qkv[:, :rotated])
    heads = rotate(heads.view(len(x), -1, spec.head_dim), *rotation)
    if spec.qk_norm_is_last:
        heads = layer.qk_norm(heads.flatten(1)).view_as(heads)
    query, key = heads[:, : spec.num_heads], heads[:, spec.num_heads :]
    if query_scale is not None and spec.scales_queries(index):
        query = query * query_scale[:, None, None].to(query.dtype)
    if has_kv:
        # The last columns: those of the keys, if there are none for values.
        value = qkv[:, -spec.kv_size :].view(-1, spec.num_kv_heads, spec.head_dim)
        pages.write(index, slots, key, layer.value_norm(value))
    source, scale, cap = spec.kv_sources[index], spec.attention_scale, spec.attention_soft_cap
    mixed = grouped_attention(pages, source, query, groups, scale=scale, cap=cap, sinks=layer.sinks)
    mixed = mixed.flatten(1)
    return layer.output(mixed * torch.sigmoid(gate) if spec.gated_attention else mixed)


def load(config: WorkerConfig, info: CheckpointInfo) -> Backend:
    """The factory for the backend registry. Raises ModelError."""
    if config.pipeline_parallel_size > 1:
        return load_first_stage(config, info.spec, lambda: ReferenceLoading(config, info))
    loading = ReferenceLoading(config, info)
    loading.load_weights(None)
    return loading.backend(*loading.cache_sizes())


def load_stage(config: WorkerConfig, info: CheckpointInfo) -> StageRank:
    """The factory of ranks that only compute layers. Raises ModelError and PeerLost."""
    return load_later_stage(config, lambda: ReferenceLoading(config, info))


class ReferenceLoading:
    """Loads a rank's part of a model, in stages (``StageLoading``) or not."""

    def __init__(self, config: WorkerConfig, info: CheckpointInfo) -> None:
        """Waits for the ranks that share the matrices. Raises ModelError and PeerLost."""
        if config.deterministic:
            logger.warning("--deterministic does nothing in plain torch: a row's last bits may depend on its batch")
        self.config, self._info = config, info
        self.spec = info.spec.divided(config.tensor_parallel_size)
        # Quantised weights of a checkpoint are dequantised at load.
        self._quantization = info.choose_quantization(config.quantization)
        self._dtype_name, self._dtype, self._device = choose_dtype(config, info)
        _check_flags(config, info, self._dtype_name)
        self._max_model_len = context_of(config, self.spec)
        self._parallel = join(config)
        self._num_logits = min(config.tokenizer_vocab_size or self.spec.vocab_size, self.spec.vocab_size)
        self._state_bytes = self.spec.state_floats * max(self._dtype.itemsize, 4)
        self._groups = divide_layers(config, self.spec)
        self._part: ModelPart | None = None
        self._weights: Weights | None = None
        self._adapters: TorchAdapters | None = None

    def measure_speed(self) -> StageSpeed:
        return measure_rank_speed(self._dtype, self._device, self.spec.num_parameters * self._dtype.itemsize)

    def work(self) -> tuple[list[PartWork], PartWork]:
        size = self._dtype.itemsize
        return rank_work(
            self.spec, self._num_logits, size, lambda part: size * num_loaded(self.spec, self._num_logits, part)
        )

    def load_weights(self, part: ModelPart | None) -> None:
        """Loads the weights; ``part``: only these, in stages. Raises ModelError."""
        config, spec, parallel = self.config, self.spec, self._parallel
        number = spec.num_loaded(self._num_logits, parallel.size)
        if part is not None:
            number = num_loaded(spec, self._num_logits, part)
        check_weights_fit(config, spec.architecture, number * self._dtype.itemsize, self._dtype_name, parallel)
        self._part = part
        weights = load_weights(
            self._info, self._dtype, self._device, config.load_format, self._num_logits, parallel, part=part
        )
        self._weights, self._adapters = add_slots(TorchAdapters, config, spec, weights, self._dtype, self._device)

    def num_blocks(self) -> int:
        return self.cache_sizes().num_blocks

    def cache_sizes(self) -> CacheSizes:
        """Returns how many blocks and recurrent states there is room for. Raises ModelError."""
        # One more page pads the tables of shorter rows.
        return cache_sizes(
            self.config, self._block_bytes(), self._state_bytes, self._max_model_len, num_spare=1,
            parallel=self._parallel, groups=self._groups.in_blocks(self.config),
        )  # fmt: skip

    def backend(self, num_blocks: int, num_slots: int = 0, layers: Sequence[int] = ()) -> ReferenceBackend:
        """Allocates the pages and the recurrent states. ``layers`` are the numbers of layers of all stages. Raises
        ModelError."""
        config, spec, weights, part = self.config, self.spec, self._weights, self._part
        assert weights is not None, "the weights come first"
        with allocated(num_blocks, self._device):
            numbers = None if part is None else part.layers
            pages = KVPages(spec, num_blocks, config.block_size, self._dtype, self._device, numbers, self._groups)
            states = StateSlots(spec, num_slots, self._dtype, self._device) if spec.has_state else None
        host_pages = take_host_pages(config, pages.by_block, self._block_bytes(), pages.num_bytes)
        facts = WorkerFacts(
            **shared_facts(config, self._info, num_blocks, MAX_BATCHED_TOKENS, num_slots, self._groups),
            state_bytes=self._state_bytes,
            backend="reference",
            dtype=self._dtype_name,
            kv_cache_dtype=self._dtype_name,
            quantization=self._quantization,
            kv_bytes=pages.num_bytes,
            weight_bytes=weights.num_bytes,
            num_host_blocks=host_pages.num_slots,
            copy_us_per_block=host_pages.measure_copy_us(),
            num_threads=config.num_threads if self._device.type == "cpu" else 0,
            stage_layers=tuple(layers),
        )
        return ReferenceBackend(
            spec, weights, pages, host_pages, facts, config.num_threads, self._num_logits, self._parallel, states,
            self._adapters, part, self._groups,
        )  # fmt: skip

    def first_part(self, num_blocks: int, layers: Sequence[int]) -> TorchPart:
        return TorchPart(self.backend(num_blocks, layers=layers), self._dtype, self._device)

    layer_part = first_part

    def _block_bytes(self) -> int:
        layers = None if self._part is None else self._part.layers
        return self._groups.bytes_per_token(self.spec, self._dtype.itemsize, layers) * self.config.block_size


def _check_flags(config: WorkerConfig, info: CheckpointInfo, dtype: str) -> None:
    """Raises ModelError if the config requires something that this backend does not support."""
    at_load = info.at_load(config.quantization)
    if at_load == "fp8" and config.device == "cpu":
        raise ModelError("--quantization fp8: is for the backend cuda: on a CPU give int8, or leave it out")
    wanted = f"--quantization {at_load}" if at_load else ""
    if config.kv_cache_dtype not in ("auto", dtype):
        wanted = f"--kv-cache-dtype {config.kv_cache_dtype}"
    if config.cpu_pinning == "on":
        wanted = "--cpu-pinning on"
    if wanted:
        raise ModelError(
            f"{wanted}: is not for the reference backend, which is in use: leave it out, or run penstock doctor to see "
            "why no other backend runs"
        )

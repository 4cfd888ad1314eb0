"""The backend in plain torch: every model, any device, float32, bfloat16, float16 and float64. The others are compared
with it; it is as fast as torch's own operations allow without compiling anything."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.reference import attention, gated_activation, rms_norm, rotate
from penstock.kernels.wide import widened
from penstock.models.attention_groups import AttentionGroup, attention_groups
from penstock.models.batch import Batch
from penstock.models.checkpoint import CheckpointInfo
from penstock.models.errors import ModelError
from penstock.models.kv_pages import KVPages
from penstock.models.loader import load_weights
from penstock.models.memory import check_weights_fit, num_kv_blocks
from penstock.models.rope import rope_tables
from penstock.models.spec import Activation, ModelSpec
from penstock.models.weights import LayerWeights, Weights
from penstock.scheduler.plan import WorkerConfig, WorkerFacts

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

ACTIVATION_NAMES = {Activation.SILU: "silu", Activation.GELU: "gelu", Activation.GELU_TANH: "gelu_tanh"}

SMALL_MODEL = 1 << 27
"""Parameters. Weights of a larger one come from memory at each step, which several threads read faster."""
SMALL_STEP = 1 << 31
"""Parameters times tokens. In a smaller step of a small model, a second thread gains less than the service's loop, with
which it shares the cores, loses."""


class ReferenceBackend:
    """A ``Backend`` over torch operations on gathered pages."""

    def __init__(self, spec: ModelSpec, weights: Weights, pages: KVPages, facts: WorkerFacts, num_threads: int) -> None:
        self.facts = facts
        self._num_threads = num_threads
        self._small_step = SMALL_STEP // spec.num_parameters if spec.num_parameters < SMALL_MODEL else 0
        self._spec = spec
        self._weights = weights
        self._pages = pages
        self._device = pages.device
        self._activation = ACTIVATION_NAMES[spec.activation]
        self._cos, self._sin = rope_tables(spec.rope, spec.head_dim, facts.max_model_len, pages.device)

    def renew(self, block_ids: list[int]) -> None:
        """The blocks have a new owner, who will write them."""
        if block_ids:
            self._pages.renew(block_ids)

    def forward(self, batch: Batch) -> Tensor:
        """Runs the layers, writing the KV of every token; returns (T, hidden) after the last norm."""
        spec, weights = self._spec, self._weights
        torch.set_num_threads(1 if len(batch.token_ids) <= self._small_step else self._num_threads)
        # Ids were checked at admission; an id out of range must still never be an address.
        token_ids = torch.from_numpy(batch.token_ids).to(self._device).clamp(0, spec.vocab_size - 1)
        positions = torch.from_numpy(batch.positions).to(self._device)
        slots = torch.from_numpy(batch.slots).to(self._device)
        cos, sin = self._cos[positions], self._sin[positions]
        groups = {
            window: attention_groups(batch, window, self._pages.num_blocks, self._pages.block_size, self._device)
            for window in set(spec.windows)
        }
        x = functional.embedding(token_ids, weights.embedding)
        for index, (layer, window) in enumerate(zip(weights.layers, spec.windows, strict=True)):
            normed = rms_norm(x, layer.attention_norm, spec.norm_eps)
            x = x + self._attend(index, layer, normed, cos, sin, slots, groups[window])
            normed = rms_norm(x, layer.mlp_norm, spec.norm_eps)
            x = x + layer.down(gated_activation(layer.gate_up(normed), self._activation))
        return rms_norm(x, weights.norm, spec.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, hidden) -> (N, tokenizer's vocabulary), in at least fp32."""
        return widened(self._weights.head(hidden))

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        groups: list[AttentionGroup],
    ) -> Tensor:
        """Attention of one layer with its output projection, (T, hidden) -> (T, hidden)."""
        spec = self._spec
        rotated = spec.query_size + spec.kv_size
        qkv = layer.qkv(x)
        heads = qkv[:, :rotated].view(-1, spec.num_heads + spec.num_kv_heads, spec.head_dim)
        if layer.qk_norm is not None:
            heads = rms_norm(heads, layer.qk_norm, spec.norm_eps)
        heads = rotate(heads, cos, sin)
        query, key = heads[:, : spec.num_heads], heads[:, spec.num_heads :]
        value = qkv[:, rotated:].view(-1, spec.num_kv_heads, spec.head_dim)
        self._pages.write(index, slots, key, value)
        mixed = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in groups:
            keys, values = self._pages.gather(index, group.table)
            part = query[group.token_start : group.token_end].view(group.num_rows, -1, *query.shape[1:])
            seen = attention(part, keys, values, group.mask, group.reach)
            mixed[group.token_start : group.token_end] = seen.flatten(0, 1)
        return layer.output(mixed.flatten(1))


def load(config: WorkerConfig, info: CheckpointInfo) -> ReferenceBackend:
    """The factory of the backend registry. Raises ModelError."""
    spec = info.spec
    dtype_name = info.dtype if config.dtype == "auto" else config.dtype
    if dtype_name not in DTYPES:
        raise ModelError(f"--dtype {config.dtype}: must be auto or one of {', '.join(DTYPES)}")
    dtype, device = DTYPES[dtype_name], _device(config.device)
    max_model_len = config.max_model_len or spec.max_positions
    if max_model_len > spec.max_positions:
        raise ModelError(
            f"--max-model-len {max_model_len}: the model was made for {spec.max_positions}; give at most that"
        )
    check_weights_fit(config, spec, dtype, device)
    num_logits = min(config.tokenizer_vocab_size or spec.vocab_size, spec.vocab_size)
    weights = load_weights(info, dtype, device, config.load_format, num_logits)
    num_blocks = num_kv_blocks(config, spec, dtype, device, max_model_len)
    try:
        pages = KVPages(spec, num_blocks, config.block_size, dtype, device)
    except RuntimeError as error:  # of torch's, for want of memory
        raise ModelError(
            f"the KV cache of {num_blocks} blocks cannot be allocated on {device}: lower --gpu-memory-utilization, "
            "--kv-cache-memory-bytes or --max-model-len"
        ) from error
    facts = WorkerFacts(
        num_blocks=num_blocks,
        block_size=config.block_size,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        architecture=spec.architecture,
        backend="reference",
        device=config.device,
        dtype=dtype_name,
        weight_bytes=weights.num_bytes,
        kv_bytes=pages.num_bytes,
    )
    return ReferenceBackend(spec, weights, pages, facts, config.num_threads)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        # torch's texts run over many lines; the first says what is wrong.
        reason = str(error).splitlines()[0]
        raise ModelError(f"--device {name}: cannot be used ({reason}): choose cpu, or repair the driver") from error
    return device

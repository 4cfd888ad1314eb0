"""Turns a ``ModelSpec`` and a checkpoint into the CPU library's model: data, and addresses of packed weights."""

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.kernels.cpu.bindings import LANES, GemmActivation, Kernels, KvLayout, StorageFormat
from penstock.kernels.cpu.program import (
    DecoderLayer,
    DecoderModel,
    ElementType,
    Expert,
    Library,
    Memory,
    PackedLinear,
    Program,
    QkNormKind,
    Rope,
)
from penstock.models.backends.cpu.weights import (
    ALIGNMENT,
    Packer,
    Tensors,
    group_made,
    narrowed,
    stored_format,
    widened,
)
from penstock.models.checkpoint import spec_parts as decoder
from penstock.models.checkpoint.eagle import FC, HIDDEN_NORM, EagleSpec
from penstock.models.checkpoint.quantization_error import QuantizationError
from penstock.models.checkpoint.quantized_layout import QuantizedLinear
from penstock.models.checkpoint.rope import attention_factor, inverse_frequencies
from penstock.models.checkpoint.spec import ModelSpec
from penstock.models.errors import ModelError

GATES = {
    decoder.Activation.SILU: GemmActivation.SILU,
    decoder.Activation.GELU: GemmActivation.GELU,
    decoder.Activation.GELU_TANH: GemmActivation.GELU_TANH,
}
QK_NORMS = {
    decoder.QkNorm.NONE: QkNormKind.NONE,
    decoder.QkNorm.HEAD: QkNormKind.HEAD,
    decoder.QkNorm.ALL: QkNormKind.ALL,
}

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ROUTER = "mlp.gate"

ELEMENT_BYTES = {StorageFormat.F32: 4, StorageFormat.BF16: 2, StorageFormat.INT8: 1, StorageFormat.INT4: 1}
"""The largest size of a weight."""


@dataclass(frozen=True)
class StorageFormats:
    """The formats that a model is held in."""

    weights: StorageFormat
    """The format of the layers' products."""
    head: StorageFormat
    table: StorageFormat
    """The format of an embedding that is not the head's matrix: F32 or BF16."""
    kv: StorageFormat


@dataclass(frozen=True)
class CpuModel:
    """A model in the library's memory. Everything that its addresses point to lives as long as this object."""

    model: DecoderModel
    library: Library
    weights: Memory
    weight_bytes: int
    """The size of the packed weights."""
    error: QuantizationError
    """The error from quantising at load."""
    parts: tuple[object, ...]

    def program(self, pages: Memory) -> Program:
        """Returns the program that runs the model's steps over KV pages."""
        self.model.pages = pages.address
        self.library.loaded()
        return self.library.program(self.model)


def kv_layout(spec: ModelSpec, format: StorageFormat) -> KvLayout:
    """Returns the layout of one layer's page, drawn in ``csrc/core/kernel_table.h``. All layers' pages of the same
    tokens are adjacent, so that fresh memory is first used evenly over time, not for all layers at once."""
    padded = -(-spec.head_dim // LANES) * LANES
    section = padded * LANES * ELEMENT_BYTES[format]
    head_bytes = 2 * section + (2 * LANES * 4 if format is StorageFormat.INT8 else 0)
    page_bytes = spec.num_layers * spec.num_kv_heads * head_bytes
    return KvLayout(format, spec.num_kv_heads, spec.head_dim, head_bytes, page_bytes)


def block_bytes(spec: ModelSpec, format: StorageFormat, block_size: int) -> int:
    """Returns the size of a block of ``block_size`` tokens, a multiple of 16, in all layers."""
    return int(kv_layout(spec, format).page_bytes) * (block_size // LANES)


def max_weight_bytes(
    spec: ModelSpec, formats: StorageFormats, quantized: Mapping[str, QuantizedLinear], kernels: Kernels
) -> int:
    """Returns the most that the packed weights need. They need little less: joining linears saves a panel at most."""
    total = 0
    for name, shape in spec.tensors():
        if len(shape) == 1:
            total += 4 * shape[0]
        elif name == EMBEDDING and not spec.tied_embeddings:
            total += math.prod(shape) * ELEMENT_BYTES[formats.table]
        else:
            rows, columns = shape
            kind = formats.head if name in (EMBEDDING, HEAD) else formats.weights
            kind, group = (StorageFormat.F32, 0) if name.endswith(f"{ROUTER}.weight") else (kind, group_made(kind))
            linear = quantized.get(name.removesuffix(".weight"))
            if linear is not None and not linear.scheme.is_float:
                kind, group = stored_format(linear.scheme.bits, linear.scheme.group, columns)
            total += -(-rows // LANES) * int(kernels.panel_bytes(kind, columns, group))
        total += ALIGNMENT
    return total


def load_model(
    spec: ModelSpec,
    formats: StorageFormats,
    tensors: Tensors,
    library: Library,
    kernels: Kernels,
    max_bytes: int,
    num_logits: int,
    block_size: int,
) -> CpuModel:
    """Packs the weights into ``max_bytes``, the result of ``max_weight_bytes``. Raises ModelError and MemoryError."""
    memory = library.memory(max_bytes)
    packer = Packer(library, kernels, tensors, formats.weights, memory.address, memory.address + memory.num_bytes)
    ropes = list(dict.fromkeys(spec.ropes))
    rope_array = (Rope * len(ropes))(
        *(Rope(packer.keep(inverse_frequencies(rope, spec.rotary_dim)), attention_factor(rope)) for rope in ropes)
    )
    hidden, vocab = spec.hidden_size, spec.vocab_size
    # The largest matrices go first: while a matrix is packed, its file's pages count as this process's memory.
    name = EMBEDDING if spec.tied_embeddings else HEAD
    head = packer.linear([name.removesuffix(".weight")], [spec.head_rows], hidden, False, format=formats.head)
    wide = formats.table is StorageFormat.F32
    table = packer.table(EMBEDDING, (vocab, hidden), wide) if spec.has_table else None
    experts: list[object] = []
    layers = (DecoderLayer * spec.num_layers)(
        *(_layer(packer, spec, index, ropes, experts) for index in range(spec.num_layers))
    )
    model = _without_weights(spec, formats, num_logits, block_size)
    model.kernels = ctypes.pointer(kernels)
    model.num_ropes, model.ropes = len(ropes), ctypes.addressof(rope_array)
    model.embedding, model.packed_embedding, model.head = table, head.parts[0], head
    model.norm = packer.vector("model.norm.weight", hidden, spec.norm_offset)
    model.layers = ctypes.addressof(layers)
    if isinstance(spec, EagleSpec):
        model.fc = packer.linear([FC], [hidden], spec.fc_columns, False)
        layers[0].hidden_norm = packer.vector(HIDDEN_NORM, hidden)
    tensors.done()
    used = packer.address - memory.address
    return CpuModel(model, library, memory, used, packer.error, (layers, rope_array, experts, packer.kept))


def _without_weights(spec: ModelSpec, formats: StorageFormats, num_logits: int, block_size: int) -> DecoderModel:
    """Returns a model's sizes and constants, without an address of a weight."""
    clamped = spec.experts.gate if spec.experts else None
    kv = kv_layout(spec, formats.kv)
    return DecoderModel(
        vocab_size=spec.vocab_size,
        num_logits=num_logits,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rotary_dim=spec.rotary_dim,
        num_experts=spec.experts.num_experts if spec.experts else 0,
        experts_per_token=spec.experts.per_token if spec.experts else 0,
        expert_size=spec.experts.intermediate_size if spec.experts else 0,
        normalise_experts=bool(spec.experts and spec.experts.normalise),
        expert_activation=GATES[spec.activation] if clamped is None else GemmActivation.CLAMPED,
        gate_alpha=clamped.alpha if clamped else 0.0,
        gate_limit=clamped.limit if clamped else 0.0,
        qk_norm=QK_NORMS[spec.qk_norm],
        activation=GATES[spec.activation],
        block_size=block_size,
        norm_eps=spec.norm_eps,
        embedding_scale=_rounded(spec.embedding_scale, formats),
        attention_scale=spec.attention_scale,
        attention_soft_cap=spec.attention_soft_cap or 0.0,
        logit_soft_cap=spec.logit_soft_cap or 0.0,
        embedding_format=formats.table,
        kv=kv,
        layer_bytes=kv.kv_heads * kv.head_bytes,
    )


def _layer(
    packer: Packer, spec: ModelSpec, index: int, ropes: list[decoder.Rope], experts: list[object]
) -> DecoderLayer:
    prefix = f"model.layers.{index}."
    attention, hidden, inner = f"{prefix}self_attn.", spec.hidden_size, spec.intermediate_size
    norms = [
        None if name is None else packer.vector(f"{prefix}{name}.weight", hidden, spec.norm_offset)
        for name in spec.layer_norms
    ]
    query_norm = key_norm = None
    if spec.qk_norm is not decoder.QkNorm.NONE:
        whole = spec.qk_norm is decoder.QkNorm.ALL
        sizes = (spec.query_size, spec.kv_size) if whole else (spec.head_dim, spec.head_dim)
        query_norm = packer.vector(f"{attention}q_norm.weight", sizes[0], spec.norm_offset)
        key_norm = packer.vector(f"{attention}k_norm.weight", sizes[1], spec.norm_offset)
    qkv = [f"{attention}{name}" for name in ("q_proj", "k_proj", "v_proj")]
    layer = DecoderLayer(
        attention_norm=norms[0],
        attention_post_norm=norms[1],
        mlp_norm=norms[2],
        mlp_post_norm=norms[3],
        query_norm=query_norm,
        key_norm=key_norm,
        sinks=packer.vector(f"{attention}sinks", spec.num_heads) if spec.sinks else None,
        window=spec.windows[index] or 0,
        rope=ropes.index(spec.ropes[index]),
        qkv=packer.linear(qkv, [spec.query_size, spec.kv_size, spec.kv_size], spec.qkv_columns, spec.qkv_bias),
        output=packer.linear([f"{attention}o_proj"], [hidden], spec.query_size, spec.output_bias),
    )
    if spec.experts is None or not spec.has_experts(index):
        layer.gate_up, layer.down = _mlp(packer, f"{prefix}mlp.", hidden, inner, spec.mlp_bias)
        return layer
    kinds = spec.experts
    # In float32: the router's choice depends on small differences, and the cost is negligible.
    layer.router = packer.linear([prefix + ROUTER], [kinds.num_experts], hidden, kinds.biased, format=StorageFormat.F32)
    array = (Expert * kinds.num_experts)(
        *(
            Expert(*_mlp(packer, f"{prefix}mlp.experts.{expert}.", hidden, kinds.intermediate_size, kinds.biased))
            for expert in range(kinds.num_experts)
        )
    )
    for expert in array:
        if expert.gate_up.num_parts != 1 or expert.gate_up.parts[0].order or expert.down.parts[0].order:
            raise ModelError(
                f"{prefix}mlp: its experts have input orders of their own (g_idx), though desc_act or actorder is off "
                "in config.json: give --backend reference, or use a checkpoint without them"
            )
    experts.append(array)
    layer.experts = ctypes.addressof(array)
    return layer


def _mlp(packer: Packer, prefix: str, hidden: int, inner: int, biased: bool) -> tuple[PackedLinear, PackedLinear]:
    gate_up = packer.linear([f"{prefix}gate_proj", f"{prefix}up_proj"], [inner, inner], hidden, biased, gated=True)
    return gate_up, packer.linear([f"{prefix}down_proj"], [hidden], inner, biased)


def _rounded(scale: float, formats: StorageFormats) -> float:
    """Returns the embeddings' scale, rounded to the model's dtype."""
    if formats.table is StorageFormat.F32:
        return scale
    return float(widened(narrowed(np.array([scale], dtype=np.float32)), ElementType.BF16)[0])

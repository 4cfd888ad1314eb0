"""Turns a ``ModelSpec`` and a checkpoint into the CPU library's model: data, and addresses of packed weights."""

import ctypes
import math
from dataclasses import dataclass

import numpy as np

from penstock.kernels.cpu.bindings import GemmActivation, Kernels, StorageFormat
from penstock.kernels.cpu.program import (
    DecoderLayer,
    DecoderModel,
    ElementType,
    Library,
    Memory,
    Norm,
    PackedMlp,
    Program,
    QkNormKind,
    Rope,
)
from penstock.models.architecture import spec_parts as decoder
from penstock.models.architecture.rope import attention_factor, inverse_frequencies
from penstock.models.architecture.spec import BESIDE_NORMS, ModelSpec
from penstock.models.backends.cpu.latent import add_latent
from penstock.models.backends.cpu.recurrent import add_recurrent, slot_floats
from penstock.models.backends.cpu.sizes import (
    EMBEDDING,
    HEAD,
    LAYER_EMBEDDING,
    LAYER_PROJECTION,
    POSITIONS,
    ROUTER,
    SHARED_GATE,
    StorageFormats,
    kv_layouts,
)
from penstock.models.backends.cpu.weights import (
    Packer,
    Tensors,
    narrowed,
    widened,
)
from penstock.models.backends.kv_groups import KvGroups, one_group
from penstock.models.backends.pipeline_parallel import ModelPart
from penstock.models.batch.rows import Ids
from penstock.models.checkpoint.draft_head import FC, HeadSpec
from penstock.models.checkpoint.mtp import EMBEDDING_NORM, MtpSpec
from penstock.models.checkpoint.quantization.reader import QuantizationError
from penstock.models.errors import ModelError

SMALL_STEP = 1 << 26
"""The largest number of products in a small step. In such a step, a second thread gains less than it costs the
service's loop, with which it shares the cores: a guess, not measured."""

ACTIVATIONS = {kind: GemmActivation[kind.name] for kind in decoder.Activation}
QK_NORMS = {
    decoder.QkNorm.NONE: QkNormKind.NONE,
    decoder.QkNorm.HEAD: QkNormKind.HEAD,
    decoder.QkNorm.EACH_HEAD: QkNormKind.EACH_HEAD,
    decoder.QkNorm.ALL: QkNormKind.ALL,
    decoder.QkNorm.UNWEIGHTED: QkNormKind.HEAD,
}


@dataclass(frozen=True)
class CpuModel:
    """A model in the library's memory. Everything that its addresses point to lives as long as this object."""

    model: DecoderModel
    library: Library
    weights: Memory
    weight_bytes: int
    error: QuantizationError
    num_parameters: int
    """The parameters of the whole model, whatever part of it this is."""
    pair_products: int
    """The products that attention computes for a query's token and one that it sees, in all layers of the part."""
    parts: tuple[object, ...]

    def program(self, pages: Memory, part: DecoderModel | None = None, states: Memory | None = None) -> Program:
        """Returns the program that runs the model's steps over KV pages and recurrent states, or only a part of each
        step."""
        model = part or self.model
        model.pages, model.states = pages.address, states and states.address
        self.library.loaded()
        return self.library.program(model)

    def num_threads(self, num_tokens: int, num_pairs: int = 0) -> int:
        """Returns how many threads compute a step: one if it is small. ``num_pairs`` comes from ``seen_pairs``."""
        products = num_tokens * self.num_parameters + num_pairs * self.pair_products
        return 1 if products <= SMALL_STEP else self.library.num_threads


def seen_pairs(starts: Ids, ends: Ids) -> int:
    """Returns how many pairs of a token and one that it sees there are at most, for rows that compute their tokens from
    ``starts`` to ``ends``, both (R,)."""
    return int(np.dot(ends - starts, ends))


def load_model(
    spec: ModelSpec,
    formats: StorageFormats,
    tensors: Tensors,
    library: Library,
    kernels: Kernels,
    max_bytes: int,
    num_logits: int,
    block_size: int,
    part: ModelPart | None = None,
    groups: KvGroups | None = None,
) -> CpuModel:
    """Packs the weights of a part, by default of all, into ``max_bytes``, the result of ``max_weight_bytes``. Layers
    have KV in ``groups``, by default in one. Raises ModelError and MemoryError."""
    part, groups = part or ModelPart.whole(spec), groups or one_group(spec)
    memory = library.memory(max_bytes)
    packer = Packer(library, kernels, tensors, formats.weights, memory.address, memory.address + memory.num_bytes)
    ropes = list(dict.fromkeys(spec.rotations))
    rope_array = (Rope * len(ropes))(
        *(
            Rope(packer.keep(inverse_frequencies(rope, rotary_dim)), attention_factor(rope), rotary_dim // 2)
            for rope, rotary_dim in ropes
        )
    )
    model = _without_weights(spec, formats, num_logits, block_size, part)
    if part.has_ends:
        # The largest matrices go first: while a matrix is packed, its file's pages count as this process's memory.
        _add_ends(packer, spec, formats, model)
    kept: list[object] = []
    layouts, rotations = kv_layouts(spec, formats.kv, part, groups), spec.rotations
    layers = (DecoderLayer * len(part.layers))(*(_layer(packer, spec.at(index), index, kept) for index in part.layers))
    for layer, index, (layout, offset) in zip(layers, part.layers, layouts, strict=True):
        layer.kv, layer.kv_offset, layer.kv_group = layout, offset, groups.of_layers[index]
        layer.rope = ropes.index(rotations[index])
    model.kernels, model.page_bytes = ctypes.pointer(kernels), layouts[0][0].page_bytes
    model.num_ropes, model.ropes = len(ropes), ctypes.addressof(rope_array)
    model.layers = ctypes.addressof(layers)
    if isinstance(spec, HeadSpec):
        model.continues_after_norm = spec.continues_after_norm
        model.fc = packer.linear([FC], [spec.hidden_size], spec.fc_columns, False)
        hidden_norm = Norm(packer.vector(spec.hidden_norm, spec.hidden_size, spec.norm_offset))
        if isinstance(spec, MtpSpec):
            embedding_norm = Norm(packer.vector(EMBEDDING_NORM, spec.hidden_size, spec.norm_offset))
            model.embedding_norm, model.hidden_norm = embedding_norm, hidden_norm
        else:
            layers[0].hidden_norm = hidden_norm
    tensors.done()
    used = packer.address - memory.address
    pair_products = sum(2 * spec.at(index).query_size for index in part.layers if spec.attends(index))
    parts = (layers, rope_array, kept, packer.kept)
    return CpuModel(model, library, memory, used, packer.error, spec.num_parameters, pair_products, parts)


def _add_ends(packer: Packer, spec: ModelSpec, formats: StorageFormats, model: DecoderModel) -> None:
    """Packs what comes before the layers and after them."""
    hidden, wide = spec.hidden_size, formats.table is StorageFormat.F32
    if spec.has_head:
        name = (EMBEDDING if spec.tied_embeddings else HEAD).removesuffix(".weight")
        head = packer.linear([name], [spec.head_rows], hidden, spec.head_bias, format=formats.head)
        model.packed_embedding, model.head = head.parts[0], head
    if spec.has_table:
        model.embedding = packer.table(EMBEDDING, (spec.vocab_size, hidden), wide)
    if (positions := spec.position_table) is not None:
        model.position_table = packer.table(POSITIONS, (positions.num_rows, hidden), True)
        model.position_offset = positions.offset
    if spec.layer_inputs is not None:
        columns, size = spec.num_layers * spec.layer_inputs.size, spec.layer_inputs.size
        model.input_embedding = packer.table(LAYER_EMBEDDING, (spec.layer_inputs.vocab_size, columns), wide)
        model.input_linear = packer.linear([LAYER_PROJECTION], [columns], hidden, False)
        model.input_linear_norm = Norm(packer.vector("model.per_layer_projection_norm.weight", size, spec.norm_offset))
    model.norm = _norm(packer, spec, "model.norm")


def _without_weights(
    spec: ModelSpec, formats: StorageFormats, num_logits: int, block_size: int, part: ModelPart
) -> DecoderModel:
    """Returns a model's sizes and constants, without an address of a weight."""
    inputs = spec.layer_inputs
    return DecoderModel(
        **_expert_fields(spec),
        vocab_size=spec.vocab_size,
        num_logits=num_logits,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=len(part.layers),
        num_heads=spec.num_heads,
        qk_norm=QK_NORMS[spec.qk_norm],
        qk_norm_is_last=spec.qk_norm_is_last,
        activation=ACTIVATIONS[spec.activation],
        gated_attention=spec.gated_attention,
        gated_mlp=spec.gated_mlp,
        layer_norms=spec.norm_kind is decoder.NormKind.LAYER,
        parallel_layers=spec.is_parallel,
        chunked_windows=spec.chunked_windows,
        query_scaling_positions=spec.query_scaling.original_max_positions if spec.query_scaling else 0,
        query_scaling_shift=spec.query_scaling.shift if spec.query_scaling else 0,
        query_scaling_beta=spec.query_scaling.beta if spec.query_scaling else 0.0,
        block_size=block_size,
        norm_eps=spec.norm_eps,
        embedding_scale=_rounded(spec.embedding_scale, formats)
        if spec.rounds_embedding_scale
        else spec.embedding_scale,
        input_size=inputs.size if inputs else 0,
        input_vocab_size=inputs.vocab_size if inputs else 0,
        input_embedding_scale=_rounded(math.sqrt(inputs.size), formats) if inputs else 0.0,
        attention_scale=spec.attention_scale,
        attention_soft_cap=spec.attention_soft_cap or 0.0,
        logit_scale=spec.logit_scale,
        logit_soft_cap=spec.logit_soft_cap or 0.0,
        embedding_format=formats.table,
        state_floats=slot_floats(spec),
    )


def _expert_fields(spec: ModelSpec) -> dict[str, object]:
    experts = spec.experts
    if experts is None:
        return {}
    return {
        "num_experts": experts.num_experts,
        "experts_per_token": experts.per_token,
        "expert_size": experts.intermediate_size,
        "normalise_experts": experts.normalise,
        "shared_size": experts.shared_size,
        "scores_are_sigmoids": experts.scoring is decoder.Scoring.SIGMOID,
        "num_groups": experts.num_groups,
        "groups_per_token": experts.groups_per_token,
        "expert_scale": experts.scale,
        "scales_expert_inputs": experts.scales_inputs,
        "expert_activation": ACTIVATIONS[spec.activation] if experts.gate is None else GemmActivation.CLAMPED,
        "gate_alpha": experts.gate.alpha if experts.gate else 0.0,
        "gate_limit": experts.gate.limit if experts.gate else 0.0,
    }


def _norm(packer: Packer, spec: ModelSpec, name: str | None, factor: float = 1.0) -> Norm:
    """Packs a norm of hidden states, whose weight is multiplied by ``factor``, or none."""
    if name is None:
        return Norm()
    hidden, parts = spec.hidden_size, spec.norm_parts
    weight = (
        packer.vector(f"{name}.weight", hidden, spec.norm_offset, factor)
        if "weight" in parts
        else packer.keep(np.ones(hidden, np.float32))
    )
    return Norm(weight, packer.vector(f"{name}.bias", hidden) if "bias" in parts else None)


def _layer(packer: Packer, spec: ModelSpec, index: int, kept: list[object]) -> DecoderLayer:
    """Packs a layer. ``spec`` has its sizes; ``kept`` gets what has to live as long as the layer."""
    prefix = f"model.layers.{index}."
    hidden, mixer = spec.hidden_size, spec.recurrent[index]
    norms = [_norm(packer, spec, name and prefix + name) for name in spec.norms_of(index)]
    if spec.norm_placement is decoder.NormPlacement.PARALLEL:
        norms[2] = norms[0]
    layer = DecoderLayer(
        attention_norm=norms[0],
        attention_post_norm=norms[1],
        mlp_norm=norms[2],
        mlp_post_norm=norms[3],
        intermediate_size=spec.intermediate_size,
        router_norm=norms[2],
        expert_norm=norms[2],
        scalar=packer.number(f"{prefix}layer_scalar") if spec.layer_scalars else 1.0,
    )
    if spec.attends(index):
        _add_attention(packer, spec, index, f"{prefix}self_attn.", layer)
        if spec.latent is not None:
            add_latent(packer, spec, spec.latent, f"{prefix}self_attn.", layer, kept)
    if mixer is not None:
        add_recurrent(packer, spec, index, mixer, layer)
    if spec.layer_inputs is not None:
        size = spec.layer_inputs.size
        layer.input_gate = packer.linear([f"{prefix}per_layer_input_gate"], [size], hidden, False)
        layer.input_projection = packer.linear([f"{prefix}per_layer_projection"], [hidden], size, False)
        layer.input_norm = _norm(packer, spec, f"{prefix}post_per_layer_input_norm")
    beside = spec.experts is not None and spec.experts.beside_mlp
    if spec.has_mlp(index) and (beside or not spec.has_experts(index)):
        layer.mlp = _mlp(packer, f"{prefix}mlp.", hidden, spec.intermediate_size, spec.mlp_bias, spec.gated_mlp)
    if spec.experts is not None and spec.has_experts(index):
        _add_experts(packer, spec, spec.experts, prefix, layer, kept)
    return layer


def _add_attention(packer: Packer, spec: ModelSpec, index: int, prefix: str, layer: DecoderLayer) -> None:
    """Packs a layer's attention."""
    if spec.qk_norm is decoder.QkNorm.UNWEIGHTED and spec.norms_qk(index):
        layer.query_norm = layer.key_norm = Norm(packer.keep(np.ones(spec.head_dim, np.float32)))
    elif spec.norms_qk(index):
        query, key = spec.qk_norm_shapes
        layer.query_norm = Norm(packer.vector(f"{prefix}q_norm.weight", query, spec.norm_offset))
        if spec.has_kv(index):
            layer.key_norm = Norm(packer.vector(f"{prefix}k_norm.weight", key, spec.norm_offset))
    if spec.value_norm:
        layer.value_norm = Norm(packer.keep(np.ones(spec.head_dim, np.float32)))
    layer.sinks = packer.vector(f"{prefix}sinks", spec.num_heads) if spec.sinks else None
    layer.window = spec.windows[index] or 0
    layer.scales_queries = spec.scales_queries(index)
    layer.has_kv = spec.has_kv(index)
    layer.values_are_keys = spec.values_are_keys(index)
    qkv = {f"{prefix}{name}": rows for name, rows in spec.qkv_rows(index).items()}
    layer.qkv = packer.linear(list(qkv), list(qkv.values()), spec.qkv_columns, spec.qkv_bias)
    layer.output = packer.linear([f"{prefix}o_proj"], [spec.hidden_size], spec.output_columns, spec.output_bias)


def _add_experts(
    packer: Packer, spec: ModelSpec, kinds: decoder.Experts, prefix: str, layer: DecoderLayer, kept: list[object]
) -> None:
    """Packs a layer's experts and its router; ``kept`` gets the experts."""
    hidden = spec.hidden_size
    if kinds.beside_mlp:
        layer.router_norm, layer.expert_norm, layer.expert_post_norm, layer.mlp_inner_norm = (
            _norm(packer, spec, prefix + name, factor)
            for name, factor in zip(BESIDE_NORMS, (hidden**-0.5, 1.0, 1.0, 1.0), strict=True)
        )
        layer.expert_scales = packer.vector(f"{prefix}{ROUTER}.per_expert_scale", kinds.num_experts)
    # In float32: the router's choice depends on small differences, and the cost is negligible.
    layer.router = packer.linear([prefix + ROUTER], [kinds.num_experts], hidden, kinds.biased, format=StorageFormat.F32)
    if kinds.selection_bias:
        layer.selection_bias = packer.vector(f"{prefix}{ROUTER}.e_score_correction_bias", kinds.num_experts)
    if kinds.shared_size:
        layer.shared = _mlp(
            packer, f"{prefix}mlp.shared_expert.", hidden, kinds.shared_size, kinds.biased, spec.gated_mlp
        )
    if kinds.shared_gated:
        layer.shared_gate = packer.linear([prefix + SHARED_GATE], [1], hidden, False, format=StorageFormat.F32)
    array = (PackedMlp * kinds.num_experts)(
        *(
            _mlp(
                packer, f"{prefix}mlp.experts.{expert}.", hidden, kinds.intermediate_size, kinds.biased, spec.gated_mlp
            )
            for expert in range(kinds.num_experts)
        )
    )
    for expert in array:
        if expert.gate_up.num_parts != 1 or expert.gate_up.parts[0].order or expert.down.parts[0].order:
            raise ModelError(
                f"{prefix}mlp: its experts have input orders of their own (g_idx), though desc_act or actorder is off "
                "in config.json: give --backend reference, or use a checkpoint without them"
            )
    kept.append(array)
    layer.experts = ctypes.addressof(array)


def _mlp(packer: Packer, prefix: str, hidden: int, inner: int, biased: bool, gated: bool = True) -> PackedMlp:
    names = [f"{prefix}gate_proj", f"{prefix}up_proj"] if gated else [f"{prefix}up_proj"]
    gate_up = packer.linear(names, [inner] * len(names), hidden, biased, gated=gated)
    return PackedMlp(gate_up, packer.linear([f"{prefix}down_proj"], [hidden], inner, biased))


def _rounded(scale: float, formats: StorageFormats) -> float:
    """Returns the embeddings' scale, rounded to the model's dtype."""
    if formats.table is StorageFormat.F32:
        return scale
    return float(widened(narrowed(np.array([scale], dtype=np.float32)), ElementType.BF16)[0])

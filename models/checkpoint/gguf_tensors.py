"""Finds the tensors of a model in a GGUF file, and gives them the names and layouts of ``ModelSpec.tensors``."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from penstock.models.architecture.rope import row_order
from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import DefaultRope, LongRope, NormPlacement, NoRope, ProportionalRope
from penstock.models.checkpoint.files.ggml import block_size, byte_size
from penstock.models.checkpoint.files.safetensors import TensorFiles
from penstock.models.checkpoint.files.safetensors_header import TensorEntry
from penstock.models.checkpoint.gguf.families import FACTORS_LONG, FACTORS_SHORT
from penstock.models.checkpoint.gguf.header import GgufHeader
from penstock.models.checkpoint.gguf.hybrid_tensors import mixer_parts, taken
from penstock.models.checkpoint.gguf.metadata import Metadata
from penstock.models.checkpoint.quantization.layout import QuantizedLinear
from penstock.models.checkpoint.quantization.scheme import QuantLayout, QuantScheme
from penstock.models.errors import ModelError

FOUR_BIT = QuantScheme(QuantLayout.Q4_0, group=32, has_zeros=False, is_ordered=False)
"""Q4_0: four-bit codes around 8, and a scale for 32 columns. Kernels read it as it is."""

_FREQUENCIES = "rope_freqs.weight"
_IMMENSE = 1e20
"""With a factor this large, an angle is zero at every position."""
_NOT_WEIGHTS = (_FREQUENCIES, FACTORS_SHORT, FACTORS_LONG)
_LAYER = re.compile(r"blk\.(\d{1,5})\.([\w.]+?)(?:\.(weight|bias|scale))?")
_OUTER = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # LFM2's name
    "output": "lm_head",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "inp_gate": "per_layer_input_gate",
    "post_ffw_norm_1": "mlp.dense_post_norm",
    "post_ffw_norm_2": "mlp.experts_post_norm",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "mlp.experts_norm",
    "proj": "per_layer_projection",
}
_WHOLE_NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_down_exps.scale": "mlp.gate.per_expert_scale",
    "ffn_gate_inp.scale": "mlp.gate_norm.weight",
    "layer_output_scale.weight": "layer_scalar",
}
"""Tensors of a layer whose names end differently in the file."""
_OF_KV = ("attn_k", "attn_v", "attn_k_norm")
_EXPERTS = {
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_exps": ("gate_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_up_exps": ("up_proj",),
}
"""The matrices of each expert that a tensor contains."""


@dataclass(frozen=True)
class FoundTensor:
    """A tensor of the model."""

    source: str
    """The name in the file of the tensor that contains it."""
    entry: TensorEntry


def find_tensors(header: GgufHeader, spec: ModelSpec) -> dict[str, FoundTensor]:
    """Returns the tensors of the file under the names of ``spec.tensors()``, with their rows in a backend's order.
    Unknown tensors keep their names. Raises ModelError if one comes twice."""
    found: dict[str, FoundTensor] = {}
    draft_layers = range(spec.num_layers, spec.num_layers + Metadata(header).num_draft_layers)
    for source, entry in header.tensors.items():
        match = _LAYER.fullmatch(source)
        if source in _NOT_WEIGHTS or (match and int(match[1]) in draft_layers):
            continue
        for name, part in _parts(source, entry, spec):
            if name in found:
                raise ModelError(
                    f"{entry.file}: tensor {source} is the same as {found[name].source}: download the file again"
                )
            rows = row_order(spec, name.rpartition(".")[0])
            if rows is not None and len(rows) == part.shape[0]:
                part = replace(part, rows=rows)
            found[name] = FoundTensor(source, part)
    return found


def find_four_bit(spec: ModelSpec, entries: Mapping[str, TensorEntry]) -> dict[str, QuantizedLinear]:
    """Returns the linears that are kept in four bits as they are stored. Experts are kept only if all of them
    can be."""
    linears = {}
    experts = []
    for name, shape in spec.tensors():
        linear = name.removesuffix(".weight")
        if len(shape) != 2 or not linear.endswith(("_proj", "lm_head")):
            continue
        entry = entries[name]
        is_expert = ".experts." in linear
        if is_expert:
            experts.append(linear)
        # Rows that are taken from a larger tensor are dequantised.
        if entry.dtype == "Q4_0" and (entry.rows is None or int(entry.rows.max()) < shape[0]):
            stored = {"weight": replace(entry, rows=None)}
            linears[linear] = QuantizedLinear(linear, FOUR_BIT, *shape, stored, entry.rows)
    if any(expert not in linears for expert in experts):
        for expert in experts:
            linears.pop(expert, None)
    return linears


def with_rope_factors(header: GgufHeader, spec: ModelSpec) -> ModelSpec:
    """Applies the factors of the rope's frequencies, which some files have as a tensor. Raises ModelError."""
    name = next((name for name in (_FREQUENCIES, FACTORS_SHORT) if name in header.tensors), None)
    if name is None:
        return spec
    entry = header.tensors[name]
    proportional = next(((rope, size) for rope, size in spec.rotations if isinstance(rope, ProportionalRope)), None)
    rotary_dim = spec.rotary_dim if proportional is None else proportional[1]
    if entry.dtype != "F32" or entry.shape != (rotary_dim // 2,):
        raise ModelError(
            f"{entry.file}: tensor {name} is {entry.dtype} {list(entry.shape)}, and the model rotates "
            f"{rotary_dim} dimensions: download the file again"
        )
    factors = TensorFiles([entry.file]).array(entry).astype(np.float64)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError(f"{entry.file}: tensor {name} has a factor that is not above zero: download the file again")
    if proportional is not None:
        # Pairs that are not rotated have a huge factor.
        num_rotated = int(proportional[0].part * len(factors))
        if (factors[:num_rotated] != 1.0).any() or (factors[num_rotated:] < _IMMENSE).any():
            raise ModelError(
                f"{entry.file}: tensor {name} does not rotate the first {num_rotated} of {len(factors)} pairs, as "
                f"{spec.architecture} does: use the model's safetensors version"
            )
        return spec
    key = f"{header.metadata['general.architecture']}.rope.scaling.attn_factor"
    scale = header.metadata.get(key, 1.0) if name == FACTORS_SHORT else 1.0
    if not isinstance(scale, float) or not 0 < scale < math.inf:
        raise ModelError(f"{header.path}: {key} is {str(scale)[:60]}, and must be above zero: download the file again")
    if not all(isinstance(rope, DefaultRope | NoRope) for rope in spec.ropes):
        raise ModelError(f"{entry.file}: tensor {name} and rope.scaling.type exclude each other: use another file")
    values = tuple(factors.tolist())
    ropes = tuple(rope if isinstance(rope, NoRope) else LongRope(rope.theta, values, scale) for rope in spec.ropes)
    return replace(spec, ropes=ropes)


def _parts(source: str, entry: TensorEntry, spec: ModelSpec) -> Iterator[tuple[str, TensorEntry]]:
    """Yields the tensors of the model that a tensor of the file consists of."""
    match = _LAYER.fullmatch(source)
    if match is None:
        outer, _, kind = source.rpartition(".")
        yield f"{_OUTER.get(outer, outer)}.{kind}", entry
        return
    prefix, name, kind = f"model.layers.{match[1]}.", match[2], match[3]
    layer = int(match[1])
    whole = name if kind is None else f"{name}.{kind}"
    mixer = spec.recurrent[layer] if layer < spec.num_layers else None
    of_mixer = [] if mixer is None else list(mixer_parts(whole, entry, mixer, spec.hidden_size))
    if name in _OF_KV and layer < spec.num_layers and not spec.has_kv(layer):
        return  # it attends to keys and values of another layer
    if of_mixer:
        yield from ((prefix + part, piece) for part, piece in of_mixer)
    elif kind is None:
        yield source, entry
    elif whole in _WHOLE_NAMES:
        yield prefix + _WHOLE_NAMES[whole], entry
    elif parts := list(_pieces(name, entry, spec)):
        yield from ((f"{prefix}{part}.{kind}", piece) for part, piece in parts)
    else:
        yield f"{prefix}{_in_layer(name, spec)}.{kind}", entry


def _pieces(name: str, entry: TensorEntry, spec: ModelSpec) -> Iterator[tuple[str, TensorEntry]]:
    """Yields the linears of a layer that a tensor of the file consists of, if they are several or have other shapes."""
    experts, queries = spec.experts, spec.query_size
    if name == "attn_q" and spec.gated_attention and entry.shape[0] == 2 * queries:
        # Of each head the query, then the gate.
        rows = np.arange(2 * queries).reshape(spec.num_heads, 2, spec.head_dim)
        for index, part in enumerate(("q_proj", "gate_proj")):
            yield f"self_attn.{part}", taken(entry, rows[:, index])
    elif name == "attn_qkv" and entry.shape[0] == queries + 2 * spec.kv_size:
        heads = {"q_proj": queries, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
        yield from _split(entry, {f"self_attn.{part}": rows for part, rows in heads.items()})
    elif name in ("attn_k_b", "attn_v_b"):
        # The matrices of all heads, one below the other.
        shape = (math.prod(entry.shape[:-1]), entry.shape[-1])
        yield f"self_attn.{name.removeprefix('attn_')}_proj", replace(entry, shape=shape)
    elif name == "ffn_up" and spec.gated_mlp and entry.shape[0] == 2 * spec.intermediate_size:
        yield from _split(entry, dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), spec.intermediate_size))
    elif name == "ffn_gate_inp_shexp":
        # The format drops the dimension of size one.
        yield "mlp.shared_expert_gate", replace(entry, shape=(1, entry.shape[-1]))
    elif name in _EXPERTS and experts is not None and entry.shape[0] == experts.num_experts and len(entry.shape) > 1:
        for expert in range(experts.num_experts):
            whole = replace(_rows(entry, expert, 1), shape=entry.shape[1:])
            names = [f"mlp.experts.{expert}.{part}" for part in _EXPERTS[name]]
            is_fused = len(names) > 1 and len(whole.shape) > 1
            yield from (
                _split(whole, dict.fromkeys(names, whole.shape[0] // len(names))) if is_fused else [(names[0], whole)]
            )


def _in_layer(name: str, spec: ModelSpec) -> str:
    """Returns the name of a norm or a linear. The norms between attention and MLP depend on where a model has norms."""
    _, after_attention, before_mlp, _ = spec.layer_norms
    if spec.norm_placement is NormPlacement.PARALLEL_NORMS and spec.architecture.startswith("Falcon"):
        norms = {"attn_norm": before_mlp, "attn_norm_2": "input_layernorm"}
    else:
        norms = {"ffn_norm": before_mlp, "post_attention_norm": after_attention or before_mlp}
    return norms.get(name) or _IN_LAYER.get(name, name)


def _split(entry: TensorEntry, sizes: Mapping[str, int]) -> Iterator[tuple[str, TensorEntry]]:
    """Yields parts of a tensor that follow each other, by their numbers of rows."""
    first = 0
    for name, size in sizes.items():
        yield name, _rows(entry, first, size)
        first += size


def _rows(entry: TensorEntry, first: int, count: int) -> TensorEntry:
    """Returns some of a tensor's rows, along its first dimension."""
    row = math.prod(entry.shape[1:])
    assert row % block_size(entry.dtype) == 0, "blocks do not reach from one row to another"
    return replace(
        entry,
        shape=(count, *entry.shape[1:]),
        offset=entry.offset + byte_size(entry.dtype, first * row),
        num_bytes=byte_size(entry.dtype, count * row),
    )

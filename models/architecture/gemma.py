"""Gemma 1 to 4."""

import math
from dataclasses import replace

from penstock.models.architecture.decoder import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_SIZE,
    MAX_VOCAB,
    Defaults,
    Family,
    read_decoder,
    read_experts,
    read_window,
    same_windows,
    shared_kv_sources,
    windows_by_type,
    with_biases,
)
from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.rope_config import read_proportional_rope, read_rope_by_layer_type
from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import (
    Activation,
    AttentionSizes,
    Experts,
    LayerInputs,
    NormPlacement,
    QkNorm,
)

GEMMA = Defaults(
    max_positions=131072,
    kv_heads=4,
    head_dim=256,
    activation_field="hidden_activation",
    activation="gelu_pytorch_tanh",
    tied_embeddings=True,
)


def gemma(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Gemma 1: Llama with one added to the norms' weights. Its ``hidden_act`` is ``gelu`` where it means the
    approximation by tanh."""
    defaults = replace(GEMMA, max_positions=8192, kv_heads=16)
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    return replace(
        with_biases(spec, fields),
        activation=Activation.GELU_TANH,
        norm_offset=1.0,
        embedding_scale=math.sqrt(spec.hidden_size),
        rounds_embedding_scale=True,
    )


def gemma2(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Gemma 2: norms around both halves of a layer, soft caps, and a window in every other layer."""
    windows = windows_by_type(fields, read_window(fields, 4096), lambda layer: layer % 2 == 0)
    spec = read_decoder(fields, architecture, windows, replace(GEMMA, max_positions=8192))
    return replace(
        _with_gemmas_parts(spec, fields),
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", 30.0),
    )


def gemma3(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Gemma 3's text model: Gemma 2 with norms on queries and keys instead of the cap on scores."""
    if "attn_logit_softcapping" in fields:
        raise fields.wrong("attn_logit_softcapping", "must be null: scores have no cap in Gemma 3")
    pattern = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, 6)
    windows = windows_by_type(fields, read_window(fields, 4096), lambda layer: (layer + 1) % pattern != 0)
    # The config of a model with vision contains only what differs from these.
    defaults = replace(GEMMA, heads=8, vocab_size=262208, read_rope=read_rope_by_layer_type)
    spec = read_decoder(fields, architecture, windows, defaults)
    return replace(
        _with_gemmas_parts(spec, fields),
        qk_norm=QkNorm.HEAD,
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", None),
    )


def gemma4(
    fields: HfConfigReader,
    architecture: str,
    *,
    default_inputs: int = 256,
    default_window: int = 512,
    max_positions: int = 131072,
) -> ModelSpec:
    """Gemma 4's text model: layers without a window have larger heads, the last layers attend to the keys and values of
    earlier ones, and layers have inputs of their own (in small models) or experts beside the MLP (in 26B-A4B).
    ``default_inputs``, ``default_window`` and ``max_positions`` apply if the config lacks these fields."""
    if "use_bidirectional_attention" in fields and fields.text("use_bidirectional_attention") != "vision":
        raise fields.wrong("use_bidirectional_attention", "must be null or vision: only causal models generate text")
    windows = windows_by_type(fields, read_window(fields, default_window), lambda layer: (layer + 1) % 6 != 0)
    if "layer_types" in fields and windows[-1] is not None:
        raise fields.wrong("layer_types", "must end with full_attention")
    windows = (*windows[:-1], None)
    defaults = replace(GEMMA, max_positions=max_positions, heads=8, vocab_size=262144, read_rope=read_proportional_rope)
    spec = with_biases(read_decoder(fields, architecture, windows, defaults), fields)
    num_shared = fields.integer("num_kv_shared_layers", 0, spec.num_layers - 1, 0)
    wide = fields.flag("use_double_wide_mlp", False) and num_shared > 0
    own = spec.num_layers - num_shared
    inner = spec.intermediate_size
    return replace(
        spec,
        intermediate_size=2 * inner if wide else inner,
        intermediate_sizes=(inner,) * own + (2 * inner,) * num_shared if wide else None,
        unwindowed=_unwindowed(fields, spec),
        kv_sources=shared_kv_sources(fields, windows, own),
        norm_placement=NormPlacement.BOTH,
        qk_norm=QkNorm.HEAD,
        value_norm=True,
        attention_scale=1.0,
        embedding_scale=math.sqrt(spec.hidden_size),
        rounds_embedding_scale=True,
        layer_inputs=_layer_inputs(fields, spec.vocab_size, default_inputs),
        layer_scalars=True,
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", None),
        experts=_experts_beside_mlp(fields) if fields.flag("enable_moe_block", False) else None,
    )


def gemma4_unified(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Gemma 4 12B: its layers have neither inputs of their own nor experts."""
    return gemma4(fields, architecture, default_inputs=0, default_window=1024, max_positions=262144)


def _unwindowed(fields: HfConfigReader, spec: ModelSpec) -> AttentionSizes | None:
    """Reads the sizes of layers without a window: from fields of their own or, as transformers 5 writes them, from
    each layer's entry in ``per_layer_config``."""
    values_are_keys = fields.flag("attention_k_eq_v", False)
    named = fields.part("per_layer_config")
    if "per_layer_config" in fields:
        # With more than ten layers, "5" is written as "05".
        names = {name.lstrip("0") or "0": name for name in named.names()}
        parts = [named.part(names.get(str(layer), str(layer))) for layer in range(spec.num_layers)]
        found = {layer: _sizes(part, spec, "head_dim", spec.head_dim) for layer, part in enumerate(parts)}
        kinds = {
            window: {found[layer] for layer, w in enumerate(spec.windows) if w == window} for window in spec.windows
        }
        usual = {(spec.num_kv_heads, spec.head_dim)}
        if any(len(sizes) > 1 for sizes in kinds.values()) or any(kinds[window] != usual for window in kinds if window):
            raise fields.wrong(
                "per_layer_config",
                "must be the same for all layers without a window, and must not change the other layers",
            )
        [(kv_heads, head_dim)] = kinds[None]
    else:
        kv_heads, head_dim = _sizes(fields, spec, "global_head_dim", 512, "num_global_key_value_heads")
        kv_heads = kv_heads if values_are_keys else spec.num_kv_heads
    if (kv_heads, head_dim, values_are_keys) == (spec.num_kv_heads, spec.head_dim, False):
        return None
    return AttentionSizes(kv_heads, head_dim, values_are_keys)


def _sizes(
    fields: HfConfigReader, spec: ModelSpec, name: str, default: int, heads_name: str = "num_key_value_heads"
) -> tuple[int, int]:
    """Reads a number of key heads and a head size."""
    head_dim = fields.integer(name, 2, MAX_HEAD_DIM, default)
    kv_heads = fields.integer(heads_name, 1, MAX_HEADS, spec.num_kv_heads)
    if head_dim % 2:
        raise fields.wrong(name, "must be even for rotary embedding")
    if spec.num_heads % kv_heads:
        raise fields.wrong(heads_name, f"must divide num_attention_heads, which is {spec.num_heads}")
    return kv_heads, head_dim


def _layer_inputs(fields: HfConfigReader, vocab_size: int, default: int) -> LayerInputs | None:
    size = fields.integer("hidden_size_per_layer_input", 0, MAX_SIZE, default)
    if not size:
        return None
    return LayerInputs(
        fields.integer("vocab_size_per_layer_input", vocab_size, MAX_VOCAB, max(vocab_size, 262144)), size
    )


def _experts_beside_mlp(fields: HfConfigReader) -> Experts:
    inner = fields.integer("moe_intermediate_size", 1, MAX_SIZE)
    return replace(
        read_experts(fields.with_aliases(num_experts_per_tok="top_k_experts"), "num_experts", 0, 0, inner),
        beside_mlp=True,
    )


def _with_gemmas_parts(spec: ModelSpec, fields: HfConfigReader) -> ModelSpec:
    """Applies what Gemma 2 and 3 share."""
    if fields.flag("use_bidirectional_attention", False):
        raise fields.wrong("use_bidirectional_attention", "is not supported: only causal models generate text")
    return replace(
        with_biases(spec, fields),
        norm_offset=1.0,
        norm_placement=NormPlacement.BOTH,
        attention_scale=fields.number("query_pre_attn_scalar", 1e-6, 1e6, 256.0) ** -0.5,
        embedding_scale=math.sqrt(spec.hidden_size),
        rounds_embedding_scale=True,
    )


def _soft_cap(fields: HfConfigReader, name: str, default: float | None) -> float | None:
    """The value of the field, or None if it is null."""
    if fields.is_null(name) or (name not in fields and default is None):
        return None
    return fields.number(name, 1e-3, 1e6, default)


FAMILIES: dict[str, Family] = {
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma4ForCausalLM": gemma4,
    "Gemma4UnifiedForCausalLM": gemma4_unified,
    "GemmaForCausalLM": gemma,
}
"""The families of this file. ``registry`` collects those of all files."""

"""Families with a mixture of experts."""

from dataclasses import replace
from functools import partial

from penstock.models.architecture.decoder import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_SIZE,
    Defaults,
    Family,
    num_layers,
    read_decoder,
    read_experts,
    read_layer_types,
    read_window,
    rotated_layers,
    same_windows,
    windows_by_type,
    with_biases,
)
from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.llama import hunyuan, lfm2_decoder, with_granites_factors
from penstock.models.architecture.recurrent import read_delta_net, read_mamba2
from penstock.models.architecture.rope_config import (
    CHUNKED,
    FULL,
    MAX_POSITIONS,
    RopeConfig,
    read_rope,
    with_default_scaling,
)
from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import ClampedGate, Experts, NoRope, QkNorm, QueryScaling, Scoring

_LINEAR = "linear_attention"
"""The name of recurrent layers in ``layer_types``."""
_NEXT = Defaults(max_positions=32768, head_dim=256, read_rope=partial(read_rope, default_part=0.25))
"""What Qwen3-Next and Qwen3.5 share."""


def mixtral(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Mixtral: experts in every layer."""
    windows = same_windows(fields, read_window(fields, None))
    defaults = Defaults(
        max_positions=4096 * 32, kv_heads=8, norm_eps=1e-5, read_rope=partial(read_rope, default_theta=1e6)
    )
    spec = read_decoder(fields, architecture, windows, defaults)
    experts = read_experts(fields, "num_local_experts", 8, 2, spec.intermediate_size)
    return replace(spec, experts=experts)


def qwen2_moe(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Qwen1.5-MoE and Qwen2-MoE: Qwen3-MoE with an MLP that every token runs through, and no norms of queries."""
    spec = _qwen_moe(fields, architecture, Defaults(max_positions=32768), 60, 4, 1408)
    assert spec.experts is not None
    shared = fields.integer("shared_expert_intermediate_size", 1, MAX_SIZE, 5632)
    return replace(
        spec,
        qkv_bias=fields.flag("qkv_bias", True),
        experts=replace(spec.experts, shared_size=shared, shared_gated=True),
    )


def qwen3_moe(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Qwen3-MoE: Qwen3 with experts."""
    spec = _qwen_moe(fields, architecture, Defaults(max_positions=32768, kv_heads=4), 128, 8, 768)
    return replace(with_biases(spec, fields), qk_norm=QkNorm.HEAD)


def _qwen_moe(
    fields: HfConfigReader, architecture: str, defaults: Defaults, experts: int, per_token: int, inner: int
) -> ModelSpec:
    """Every ``decoder_sparse_step``-th layer has experts, except those in ``mlp_only_layers``."""
    window = read_window(fields, 4096) if fields.flag("use_sliding_window", False) else None
    spec = read_decoder(fields, architecture, same_windows(fields, window), defaults)
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
    dense = fields.integers("mlp_only_layers", 0, 1 << 16)
    name = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    kinds = replace(
        read_experts(fields, name, experts, per_token, fields.integer("moe_intermediate_size", 1, MAX_SIZE, inner)),
        normalise=fields.flag("norm_topk_prob", False),
        layers=tuple((layer + 1) % step == 0 and layer not in dense for layer in range(spec.num_layers)),
    )
    return replace(spec, experts=kinds)


def olmoe(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """OLMoE: norms over all queries and all keys, and experts in every layer."""
    if "clip_qkv" in fields:
        raise fields.wrong("clip_qkv", "must be null: clipped queries, keys and values are not supported")
    defaults = Defaults(max_positions=4096, norm_eps=1e-5)
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    name = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    experts = read_experts(fields, name, 64, 8, spec.intermediate_size)
    experts = replace(experts, normalise=fields.flag("norm_topk_prob", False))
    return replace(with_biases(spec, fields), qk_norm=QkNorm.ALL, experts=experts)


def granite_moe(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Granite's MoE models: Granite with experts in every layer."""
    spec = read_decoder(fields, architecture, same_windows(fields, None), Defaults(max_positions=2048))
    experts = read_experts(fields, "num_local_experts", 8, 2, spec.intermediate_size)
    return with_granites_factors(replace(with_biases(spec, fields), experts=experts), fields)


def glm4_moe(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """GLM-4.5 and later: experts chosen by the sigmoid of their scores plus a bias, and one that every token runs
    through; the first layers have none."""
    defaults = Defaults(max_positions=131072, kv_heads=8, norm_eps=1e-5, read_rope=partial(read_rope, default_part=0.5))
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    experts = read_grouped_experts(fields, num_experts=128, per_token=8, first=1, shared=1, normalise=True)
    return replace(
        spec,
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=QkNorm.HEAD if fields.flag("use_qk_norm", False) else QkNorm.NONE,
        experts=experts,
    )


def dots1(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """dots.llm1: Qwen3's attention with GLM-4.5's experts. Without ``layer_types``, the layers from
    ``max_window_layers`` on have the window."""
    window, first = read_window(fields, 4096), fields.integer("max_window_layers", 0, MAX_POSITIONS, 62)
    windows = windows_by_type(fields, window, lambda layer: window is not None and layer >= first)
    spec = read_decoder(fields, architecture, windows, Defaults(max_positions=2048, kv_heads=32))
    experts = read_grouped_experts(fields, num_experts=None, per_token=None, first=0, shared=None, normalise=False)
    return replace(with_biases(spec, fields), qk_norm=QkNorm.HEAD, experts=experts)


def solar_open(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Solar Open: Llama with GLM-4.5's experts in every layer. Other MLPs, and their size, are not part of it."""
    fields = fields.with_aliases(intermediate_size="moe_intermediate_size")
    defaults = Defaults(
        max_positions=131072,
        kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        inner=1280,
        read_rope=partial(read_rope, default_theta=1e6),
    )
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    experts = read_grouped_experts(fields, num_experts=128, per_token=8, first=0, shared=1, normalise=True, inner=1280)
    experts = replace(experts, layers=(True,) * spec.num_layers)
    return replace(spec, qkv_bias=fields.flag("attention_bias", False), experts=experts)


def read_grouped_experts(
    fields: HfConfigReader,
    *,
    num_experts: int | None,
    per_token: int | None,
    first: int,
    shared: int | None,
    normalise: bool,
    inner: int = 1408,
    groups: int = 1,
    groups_per_token: int = 1,
    scale: float = 1.0,
) -> Experts:
    """DeepSeek V3's experts, which are chosen from the best groups by sigmoid plus bias, beside shared ones. The
    arguments are the family's defaults; None: the field is required."""
    first = fields.integer("first_k_dense_replace", 0, MAX_LAYERS, first)
    inner = fields.integer("moe_intermediate_size", 1, MAX_SIZE, inner)
    name = "num_local_experts" if "num_local_experts" in fields else "n_routed_experts"
    experts = read_experts(fields, name, num_experts, per_token, inner)
    groups = fields.integer("n_group", 1, experts.num_experts, groups)
    # A group's score is the sum of its two best experts.
    if groups > 1 and (experts.num_experts % groups or experts.num_experts < 2 * groups):
        raise fields.wrong("n_group", f"must divide {experts.num_experts} experts into groups of at least 2")
    groups_per_token = fields.integer("topk_group", 1, groups, groups_per_token)
    if experts.per_token > groups_per_token * (experts.num_experts // groups):
        raise fields.wrong("topk_group", f"must be enough groups for {experts.per_token} experts per token")
    return replace(
        experts,
        normalise=fields.flag("norm_topk_prob", normalise),
        layers=tuple(layer >= first for layer in range(num_layers(fields))),
        scoring=Scoring.SIGMOID,
        selection_bias=True,
        num_groups=groups,
        groups_per_token=groups_per_token,
        scale=fields.number("routed_scaling_factor", 1e-6, 1e6, scale),
        shared_size=inner * fields.integer("n_shared_experts", 1, 64, shared),
    )


def minimax_m2(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """MiniMax-M2: OLMoE's norms of queries and keys, and in every layer experts that are chosen by the sigmoid of their
    scores plus a bias."""
    defaults = Defaults(max_positions=196608, kv_heads=8, head_dim=128, read_rope=_read_minimax_rope)
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    experts = read_experts(fields, "num_local_experts", 256, 8, spec.intermediate_size)
    return replace(spec, qk_norm=QkNorm.ALL, experts=replace(experts, scoring=Scoring.SIGMOID, selection_bias=True))


def _read_minimax_rope(fields: HfConfigReader, head_dim: int, max_positions: int) -> RopeConfig:
    """Reads a rope whose part may be given as ``rotary_dim``, as in the published models."""
    part = fields.integer("rotary_dim", 2, head_dim, head_dim) / head_dim
    return read_rope(fields, head_dim, max_positions, default_theta=5e6, default_part=part)


def hunyuan_moe(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Hunyuan-A13B: Hunyuan's dense models with experts in every layer, and one that every token runs through."""
    spec = hunyuan(fields, architecture)
    if fields.is_list("moe_topk"):
        by_layer = set(fields.integers("moe_topk", 1, MAX_EXPERTS))
        if len(by_layer) != 1:
            raise fields.wrong("moe_topk", "must be the same for all layers")
        fields = fields.with_values(moe_topk=by_layer.pop())
    fields = fields.with_aliases(num_experts_per_tok="moe_topk")
    experts = read_experts(fields, "num_experts", 1, 1, spec.intermediate_size)
    return replace(spec, experts=replace(experts, shared_size=spec.intermediate_size))


def llama4(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Llama 4: layers that rotate attend within chunks; the others attend to everything. The scores multiply
    the experts' inputs; every token also runs through a shared expert."""
    rotated = rotated_layers(fields)
    chunk = None
    if not fields.is_null("attention_chunk_size"):
        chunk = fields.integer("attention_chunk_size", 1, MAX_POSITIONS, 8192)
    kinds = read_layer_types(fields, CHUNKED) or [CHUNKED if turns else FULL for turns in rotated]
    windows = tuple(chunk if kind == CHUNKED else None for kind in kinds)
    defaults = Defaults(
        max_positions=131072,
        kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        read_rope=partial(read_rope, default_theta=5e5),
    )
    spec = _with_llama4s_experts(read_decoder(fields, architecture, windows, defaults), fields)
    return replace(
        with_biases(spec, fields),
        chunked_windows=True,
        ropes=tuple(rope if turns else NoRope() for rope, turns in zip(spec.ropes, rotated, strict=True)),
        interleaved_rope=True,
        qk_norm=QkNorm.UNWEIGHTED if fields.flag("use_qk_norm", True) else QkNorm.NONE,
        qk_norm_is_last=True,
        query_scaling=_llama4s_query_scaling(fields),
    )


def _with_llama4s_experts(spec: ModelSpec, fields: HfConfigReader) -> ModelSpec:
    """Layers have experts if ``moe_layers`` lists them; without that field, every ``interleave_moe_layer_step``-th."""
    inner, dense = spec.intermediate_size, fields.integer("intermediate_size_mlp", 1, MAX_SIZE, 16384)
    if "moe_layers" in fields:
        chosen = set(fields.integers("moe_layers", 0, MAX_LAYERS))
    else:
        step = fields.integer("interleave_moe_layer_step", 1, MAX_LAYERS, 1)
        chosen = set(range(step - 1, spec.num_layers, step))
    layers = tuple(layer in chosen for layer in range(spec.num_layers))
    if not any(layers):
        return replace(spec, intermediate_size=dense)
    experts = replace(
        read_experts(fields, "num_local_experts", 16, 1, inner),
        normalise=False,
        layers=layers,
        scoring=Scoring.SIGMOID,
        shared_size=inner,
        scales_inputs=True,
    )
    return replace(spec, intermediate_size=inner if all(layers) else dense, experts=experts)


def _llama4s_query_scaling(fields: HfConfigReader) -> QueryScaling | None:
    name = "attn_temperature_tuning"
    # The first published configs have a number here; only zero means no.
    is_number = name in fields and not fields.is_bool(name)
    if not (fields.integer(name, 0, MAX_POSITIONS) if is_number else fields.flag(name, True)):
        return None
    return QueryScaling(
        beta=fields.number("attn_scale", 0.0, 1e3, 0.1),
        original_max_positions=fields.integer("floor_scale", 1, MAX_POSITIONS, 8192),
        shift=1,
        only_unrotated=True,
    )


def gpt_oss(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """gpt-oss: sinks, a window in every other layer, and biased experts with a gate of their own."""
    windows = windows_by_type(fields, read_window(fields, 128), lambda layer: layer % 2 == 0)
    fields = with_default_scaling(
        fields, rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096
    )
    defaults = Defaults(
        max_positions=131072,
        kv_heads=8,
        head_dim=64,
        norm_eps=1e-5,
        read_rope=partial(read_rope, default_theta=150_000.0),
    )
    spec = read_decoder(fields, architecture, windows, defaults)
    gate = ClampedGate(
        alpha=fields.number("swiglu_alpha", 0.0, 1e6, 1.702), limit=fields.number("swiglu_limit", 1e-6, 1e6, 7.0)
    )
    experts = read_experts(fields, "num_local_experts", 128, 4, spec.intermediate_size)
    return replace(
        with_biases(spec, fields, default=True), sinks=True, experts=replace(experts, biased=True, gate=gate)
    )


def lfm2_moe(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """LFM2's MoE models: LFM2 with experts, chosen by sigmoid plus bias, in all layers but the first ones."""
    spec = lfm2_decoder(fields, architecture, default_inner=7168)
    first = fields.integer("num_dense_layers", 0, MAX_LAYERS, 2)
    experts = read_experts(fields, "num_experts", 32, 4, fields.integer("moe_intermediate_size", 1, MAX_SIZE, 1792))
    experts = replace(
        experts,
        normalise=fields.flag("norm_topk_prob", True),
        layers=tuple(layer >= first for layer in range(spec.num_layers)),
        scoring=Scoring.SIGMOID,
        selection_bias=fields.flag("use_expert_bias", True),
        scale=fields.number("routed_scaling_factor", 1e-6, 1e6, 1.0),
    )
    return replace(spec, experts=experts)


def qwen3_next(fields: HfConfigReader, architecture: str, experts: int = 512, per_token: int = 10) -> ModelSpec:
    """Qwen3-Next and Qwen3.5's MoE models: Qwen3-MoE with a gated delta net in place of attention in most layers."""
    plain = fields.with_values(layer_types=None)  # they are not those of attention
    spec = _qwen_moe(plain, architecture, replace(_NEXT, kv_heads=2, inner=5632), experts, per_token, 512)
    assert spec.experts is not None
    kinds = replace(
        spec.experts,
        normalise=fields.flag("norm_topk_prob", True),
        shared_size=fields.integer("shared_expert_intermediate_size", 1, MAX_SIZE, 512),
        shared_gated=True,
    )
    return _with_delta_nets(replace(spec, experts=kinds), fields)


def qwen3_5(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Qwen3.5: Qwen3-Next with an MLP in place of experts."""
    spec = read_decoder(fields, architecture, (None,) * num_layers(fields), replace(_NEXT, kv_heads=4))
    return _with_delta_nets(spec, fields)


def _with_delta_nets(spec: ModelSpec, fields: HfConfigReader) -> ModelSpec:
    """Applies ``layer_types``, the gate of attention, and norms that multiply by 1 + weight."""
    interval = fields.integer("full_attention_interval", 1, MAX_LAYERS, 4)
    kinds = read_layer_types(fields, _LINEAR) or [
        FULL if (layer + 1) % interval == 0 else _LINEAR for layer in range(spec.num_layers)
    ]
    if FULL not in kinds:
        raise fields.wrong("layer_types", f"must leave a layer with {FULL}")
    net = read_delta_net(fields, spec.norm_eps)
    return replace(
        with_biases(spec, fields),
        qk_norm=QkNorm.HEAD,
        norm_offset=1.0,
        gated_attention=True,
        recurrent=tuple(None if kind == FULL else net for kind in kinds),
    )


def granite_hybrid(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Granite 4's hybrids: Granite with Mamba-2 in place of attention in most layers, and an MLP beside the experts, or
    only an MLP."""
    if "layer_types" in fields:
        named = [_LINEAR if kind == "mamba" else kind for kind in fields.texts("layer_types")]
        fields = fields.with_values(layer_types=named)
    kinds = read_layer_types(fields, _LINEAR) or [_LINEAR] * num_layers(fields)
    if FULL not in kinds:
        raise fields.wrong("layer_types", f"must leave a layer with {FULL}")
    spec = read_decoder(fields, architecture, (None,) * len(kinds), Defaults(max_positions=2048))
    inner = fields.integer("mamba_expand", 1, 64, 2) * spec.hidden_size
    mamba = read_mamba2(fields, inner, spec.norm_eps)
    shared = fields.integer("shared_intermediate_size", 1, MAX_SIZE, 1024)
    if fields.integer("num_local_experts", 0, MAX_EXPERTS, 8):
        experts = read_experts(fields, "num_local_experts", 8, 2, spec.intermediate_size)
        spec = replace(spec, experts=replace(experts, shared_size=shared))
    else:
        spec = replace(spec, intermediate_size=shared)
    if fields.text("position_embedding_type", "none") != "rope":
        spec = replace(spec, ropes=(NoRope(),) * spec.num_layers)
    recurrent = tuple(None if kind == FULL else mamba for kind in kinds)
    return with_granites_factors(replace(with_biases(spec, fields), recurrent=recurrent), fields)


FAMILIES: dict[str, Family] = {
    "Dots1ForCausalLM": dots1,
    "Glm4MoeForCausalLM": glm4_moe,
    "GptOssForCausalLM": gpt_oss,
    "GraniteMoeForCausalLM": granite_moe,
    "GraniteMoeHybridForCausalLM": granite_hybrid,
    "HunYuanMoEV1ForCausalLM": hunyuan_moe,
    "Lfm2MoeForCausalLM": lfm2_moe,
    "Llama4ForCausalLM": llama4,
    "MiniMaxM2ForCausalLM": minimax_m2,
    "MixtralForCausalLM": mixtral,
    "OlmoeForCausalLM": olmoe,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5MoeForCausalLM": partial(qwen3_next, experts=256, per_token=8),
    "SolarOpenForCausalLM": solar_open,
}
"""The families of this file. ``registry`` collects those of all files."""

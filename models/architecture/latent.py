"""Families with latent attention (see ``LatentAttention``): DeepSeek V2 and V3, and those made like them."""

from dataclasses import replace

from penstock.models.architecture.decoder import (
    MAX_HEAD_DIM,
    MAX_SIZE,
    Defaults,
    Family,
    num_layers,
    read_decoder,
    same_windows,
)
from penstock.models.architecture.experts import read_grouped_experts
from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.rope_config import read_score_factor
from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import LatentAttention, Scoring


def deepseek_v2(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """DeepSeek V2, V2.5 and Coder V2: experts chosen by softmax, in the larger models from the best groups, beside
    shared ones."""
    spec = _read_latent_decoder(fields, architecture, Defaults(max_positions=2048), q_lora_rank=1536)
    for name in ("mlp_bias", "norm_topk_prob"):
        if fields.flag(name, False):
            raise fields.wrong(name, "must be false in this family")
    method = fields.text("topk_method", "greedy")
    if method == "greedy":
        fields = fields.with_values(n_group=None, topk_group=None)
    elif method != "group_limited_greedy":
        raise fields.wrong("topk_method", "must be greedy or group_limited_greedy")
    experts = read_grouped_experts(
        fields, num_experts=64, per_token=None, first=0, shared=2, normalise=False, inner=1407
    )
    return replace(spec, experts=replace(experts, scoring=Scoring.SOFTMAX, selection_bias=False))


def deepseek_v3(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """DeepSeek V3, V3.1 and R1, Kimi K2 and Moonlight: GLM-4.5's experts."""
    spec = _read_latent_decoder(fields, architecture, Defaults(max_positions=4096), q_lora_rank=1536)
    experts = read_grouped_experts(
        fields,
        num_experts=256,
        per_token=8,
        first=3,
        shared=1,
        normalise=True,
        inner=2048,
        groups=8,
        groups_per_token=4,
        scale=2.5,
    )
    return replace(spec, experts=experts)


def glm4_moe_lite(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """GLM-4.7-Flash: DeepSeek V3 with other sizes. Without ``mlp_layer_types``, all layers but the first have
    experts."""
    defaults = Defaults(max_positions=202752, norm_eps=1e-5)
    spec = _read_latent_decoder(fields, architecture, defaults, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256)
    experts = read_grouped_experts(
        fields, num_experts=64, per_token=4, first=1, shared=1, normalise=True, inner=1536, scale=1.8
    )
    kinds = ["dense", *["sparse"] * (spec.num_layers - 1)]
    if "mlp_layer_types" in fields:
        kinds = fields.texts("mlp_layer_types")
        if len(kinds) != num_layers(fields) or not {"dense", "sparse"}.issuperset(kinds):
            raise fields.wrong("mlp_layer_types", "must have dense or sparse for each of num_hidden_layers")
    return replace(spec, experts=replace(experts, layers=tuple(kind == "sparse" for kind in kinds)))


def _read_latent_decoder(
    fields: HfConfigReader,
    architecture: str,
    defaults: Defaults,
    *,
    q_lora_rank: int,
    qk_nope_head_dim: int = 128,
    v_head_dim: int = 128,
) -> ModelSpec:
    """Reads a decoder without experts. The arguments are the family's defaults."""
    if fields.flag("attention_bias", False):
        raise fields.wrong("attention_bias", "must be false: latent attention with biases is not supported")
    latent = LatentAttention(
        q_lora_rank=None if fields.is_null("q_lora_rank") else fields.integer("q_lora_rank", 1, MAX_SIZE, q_lora_rank),
        kv_lora_rank=fields.integer("kv_lora_rank", 1, MAX_HEAD_DIM, 512),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim", 1, MAX_HEAD_DIM, qk_nope_head_dim),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim", 2, MAX_HEAD_DIM, 64),
        v_head_dim=fields.integer("v_head_dim", 1, MAX_HEAD_DIM, v_head_dim),
    )
    if latent.qk_rope_head_dim % 2:
        raise fields.wrong("qk_rope_head_dim", "must be even for rotary embedding")
    if latent.cached_dim > MAX_HEAD_DIM:
        raise fields.wrong("kv_lora_rank", f"must be at most {MAX_HEAD_DIM} together with qk_rope_head_dim")
    rotated = fields.with_values(head_dim=latent.qk_rope_head_dim, num_key_value_heads=None)
    spec = read_decoder(rotated, architecture, same_windows(fields, None), defaults)
    return replace(
        spec,
        num_kv_heads=1,
        head_dim=latent.cached_dim,
        latent=latent,
        interleaved_rope=fields.flag("rope_interleave", True),
        attention_scale=latent.qk_head_dim**-0.5 * read_score_factor(fields),
    )


FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite,
}
"""The families of this file. ``registry`` collects those of all files."""

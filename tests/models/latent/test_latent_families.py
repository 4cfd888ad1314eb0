"""What the configs of families with latent attention say, and what of them is refused."""

import math
from typing import Any

import pytest

from penstock.models.architecture.latent import FAMILIES
from penstock.models.architecture.registry import spec_from_config
from penstock.models.architecture.rope import attention_factor
from penstock.models.architecture.spec_parts import LatentAttention, Scoring
from penstock.models.errors import ModelError

# As published: the fields of these models' config.json that matter here.
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
KIMI_K2 = {
    **DEEPSEEK_V3, "first_k_dense_replace": 1, "max_position_embeddings": 131072, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "routed_scaling_factor": 2.827,
    "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0, "vocab_size": 163840,
}  # fmt: skip
V2 = {
    "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_experts_per_tok": 2,
}  # fmt: skip
LITE = {**V2, "architectures": ["Glm4MoeLiteForCausalLM"]}


def test_published_configs() -> None:
    spec = spec_from_config(DEEPSEEK_V3)
    assert spec.latent == LatentAttention(1536, 512, 128, 64, 128)
    assert spec.kv_bytes_per_token(2) == 2 * 61 * 576
    assert (spec.max_positions, spec.rotary_dim, attention_factor(spec.ropes[0])) == (163840, 64, 1.0)
    assert spec.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert spec.experts is not None
    assert (spec.experts.num_groups, spec.experts.groups_per_token, spec.experts.layers[:4]) == (8, 4, (0, 0, 0, 1))
    kimi = spec_from_config(KIMI_K2)
    assert kimi.experts is not None
    assert (kimi.max_positions, kimi.experts.num_groups, kimi.experts.shared_size) == (131072, 1, 2048)
    # The published numbers are 671 and 1,026 thousand millions, of which the first leaves out what is for drafts.
    assert (spec.num_parameters // 10**9, kimi.num_parameters // 10**9) == (671, 1026)


def test_every_family_has_a_variant(variant_configs: dict[str, dict[str, Any]]) -> None:
    assert {name for config in variant_configs.values() for name in config["architectures"]} >= FAMILIES.keys()


def test_scores_have_another_factor_only_with_a_scaled_rope() -> None:
    """transformers reads ``mscale_all_dim`` only then."""
    unscaled = {"rope_type": "default", "mscale_all_dim": 1.0}
    for scaling in (None, unscaled, {**DEEPSEEK_V3["rope_scaling"], "mscale_all_dim": 0}):
        assert spec_from_config({**DEEPSEEK_V3, "rope_scaling": scaling}).attention_scale == 192**-0.5


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_only_one_method_of_v2_has_groups(method: str) -> None:
    experts = spec_from_config({**V2, "topk_method": method, "n_group": 8, "topk_group": 3}).experts
    assert experts is not None
    assert (experts.scoring, experts.selection_bias) == (Scoring.SOFTMAX, False)
    assert (experts.num_groups, experts.groups_per_token) == ((1, 1) if method == "greedy" else (8, 3))


def test_the_layers_of_glm_lite_that_have_experts() -> None:
    for changes, layers in (({}, (0, 1)), ({"mlp_layer_types": ["sparse", "dense"]}, (1, 0))):
        experts = spec_from_config({**LITE, **changes}).experts
        assert experts is not None
        assert experts.layers == layers


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (DEEPSEEK_V3, {"attention_bias": True}, "attention_bias"),
        (DEEPSEEK_V3, {"kv_lora_rank": 961}, "kv_lora_rank"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        (DEEPSEEK_V3, {"n_group": 3}, "n_group"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (LITE, {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        (LITE, {"mlp_layer_types": ["dense", "moe"]}, "mlp_layer_types"),
    ],
)
def test_what_is_refused_names_the_field(config: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {named} is .*: it "):
        spec_from_config({**config, **changes})


def test_heads_are_not_divided_over_ranks() -> None:
    with pytest.raises(ModelError, match=r"-size 2: the model has 1 latent for all heads, .*: leave it out"):
        spec_from_config(DEEPSEEK_V3).divided(2)

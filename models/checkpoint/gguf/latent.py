"""The families with latent attention whose GGUF files can be loaded."""

from penstock.models.checkpoint.gguf.metadata import GROUPED_EXPERTS, Config, Family, Metadata

_SIGMOID = 2
_LARGE = 256
"""The experts of DeepSeek V3, whose first files have no groups."""


def _deepseek2(metadata: Metadata, config: Config) -> Config:
    """DeepSeek V2 and V3, Kimi K2 and Moonlight. V3's experts are chosen by a sigmoid."""
    names = {
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
        "qk_rope_head_dim": "rope.dimension_count",
        "v_head_dim": "attention.value_length_mla" if _is_absorbed(metadata) else "attention.value_length",
        **GROUPED_EXPERTS,
    }
    found: Config = {"q_lora_rank": None, "norm_topk_prob": False, **metadata.fields(names)}
    key = metadata.get("attention.key_length_mla" if _is_absorbed(metadata) else "attention.key_length")
    rotated = found.get("qk_rope_head_dim")
    if isinstance(key, int) and isinstance(rotated, int):
        found["qk_nope_head_dim"] = key - rotated
    with_bias = len(metadata.layers_without("exp_probs_b.bias")) < metadata.num_layers
    if metadata.get("expert_gating_func") in (_SIGMOID, None if with_bias else _SIGMOID):
        found["architectures"] = ["DeepseekV3ForCausalLM"]
        if "n_group" not in found and found.get("n_routed_experts") != _LARGE:
            found |= {"n_group": 1, "topk_group": 1}
    else:
        grouped = found.get("n_group") not in (None, 1)
        found["architectures"] = ["DeepseekV2ForCausalLM"]
        found["topk_method"] = "group_limited_greedy" if grouped else "greedy"
    rope = {name: value for name, value in config["rope_parameters"].items() if name != "partial_rotary_factor"}
    if isinstance(scale := rope.get("mscale_all_dim"), float):
        # The converter multiplies by 0.1.
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), scale / 0.1)
    return found | {"rope_parameters": rope}


def _is_absorbed(metadata: Metadata) -> bool:
    """Whether the sizes of heads are those of the absorbed form, and others have keys of their own."""
    return metadata.get("attention.key_length_mla") is not None


LATENT: dict[str, Family] = {"deepseek2": _deepseek2}
"""These families, by llama.cpp's names."""

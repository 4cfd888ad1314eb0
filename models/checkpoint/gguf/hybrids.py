"""The families with recurrent layers whose GGUF files can be loaded."""

from penstock.models.architecture.rope_config import FULL
from penstock.models.checkpoint.gguf.metadata import Config, Family, Metadata, head_dim

_CONVOLUTION, _LINEAR = "conv", "linear_attention"


def _layer_types(metadata: Metadata, tensor: str, kind: str) -> list[str]:
    """The kinds of layers: ``kind`` for those that have this tensor, or attention."""
    attending = set(metadata.layers_without(tensor))
    count = metadata.num_layers - metadata.num_draft_layers
    return [FULL if layer in attending else kind for layer in range(count)]


def _kv_heads(config: Config) -> Config:
    """The number of KV heads, which the format has for each layer: 0 in those without attention."""
    heads = config.get("num_key_value_heads")
    is_list = isinstance(heads, list) and heads and all(isinstance(each, int) for each in heads)
    return {"num_key_value_heads": max(heads)} if isinstance(heads, list) and is_list else {}


def _quotient(one: object, other: object) -> int | None:
    """One number divided by another; None if the metadata is invalid, which the family's reader reports."""
    return one // other if isinstance(one, int) and isinstance(other, int) and one > 0 and other > 0 else None


def _lfm2(metadata: Metadata, config: Config) -> Config:
    names = {"conv_L_cache": "shortconv.l_cache", "norm_eps": "attention.layer_norm_rms_epsilon"}
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "block_auto_adjust_ff_dim": False,  # the size in the file is the final one
        "layer_types": _layer_types(metadata, "shortconv.conv.weight", _CONVOLUTION),
        **_kv_heads(config),
        **metadata.fields(names),
    }


def _lfm2_moe(metadata: Metadata, config: Config) -> Config:
    names = {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "num_dense_layers": "leading_dense_block_count",
    }
    return _lfm2(metadata, config) | {"architectures": ["Lfm2MoeForCausalLM"], **metadata.fields(names)}


def _qwen3_next(metadata: Metadata, config: Config) -> Config:
    names = {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
    }
    fields = metadata.fields(names)
    types = _layer_types(metadata, "ssm_conv1d.weight", _LINEAR)
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        # The size of layers without experts; some files have none if there are no such layers.
        "intermediate_size": config.get("intermediate_size", 1),
        "num_hidden_layers": len(types),
        "layer_types": types,
        "mlp_only_layers": [layer for layer in metadata.layers_without("ffn_gate_inp.weight") if layer < len(types)],
        "attention_bias": any(metadata.has(f"blk.{layer}.attn_q.bias") for layer in range(len(types))),
        "linear_value_head_dim": _quotient(metadata.get("ssm.inner_size"), fields.get("linear_num_value_heads")),
        **_kv_heads(config),
        **fields,
    }


def _granite_hybrid(metadata: Metadata, config: Config) -> Config:
    """Granite 4's hybrids, with experts and without. The format has no rope for them, but a flag for one."""
    names = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "shared_intermediate_size": "expert_shared_feed_forward_length",
        "mamba_n_heads": "ssm.time_step_rank",
        "mamba_n_groups": "ssm.group_count",
        "mamba_d_state": "ssm.state_size",
        "mamba_d_conv": "ssm.conv_kernel",
    }
    layers = range(metadata.num_layers)
    types = _layer_types(metadata, "ssm_conv1d.weight", _LINEAR)
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": types,
        "attention_bias": any(metadata.has(f"blk.{layer}.attn_q.bias") for layer in layers),
        "attention_multiplier": (head_dim(config) or 1) ** -0.5,
        "num_local_experts": 0,
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned") else "nope",
        "mamba_expand": _quotient(metadata.get("ssm.inner_size"), config.get("hidden_size")),
        "mamba_proj_bias": any(metadata.has(f"blk.{layer}.ssm_in.bias") for layer in layers),
        "mamba_conv_bias": any(metadata.has(f"blk.{layer}.ssm_conv1d.bias") for layer in layers),
        **_kv_heads(config),
        **metadata.fields(names),
    }


HYBRIDS: dict[str, Family] = {
    "granitehybrid": _granite_hybrid,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "qwen3next": _qwen3_next,
}
"""These families, by llama.cpp's names."""

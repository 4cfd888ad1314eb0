"""Writes what GGUF files have of models with recurrent layers, as llama.cpp's converter does."""

from collections.abc import Iterator
from typing import Any

import gguf
import torch
from torch import Tensor

ARCHITECTURES = {
    "GraniteMoeHybrid": "GRANITE_HYBRID", "Lfm2Moe": "LFM2MOE", "Lfm2": "LFM2", "Qwen3Next": "QWEN3NEXT",
}  # fmt: skip
"""The library's names of families."""


def add_hybrid(writer: gguf.GGUFWriter, config: Any, kind: str) -> None:
    """Adds the metadata that other families do not have."""
    attends = [each in ("full_attention", "attention") for each in config.layer_types]
    if kind != "QWEN3NEXT":
        writer.add_head_count_kv([config.num_key_value_heads if full else 0 for full in attends])
    match kind:
        case "LFM2" | "LFM2MOE":
            writer.add_shortconv_l_cache(config.conv_L_cache)
            writer.add_layer_norm_rms_eps(config.norm_eps)
            if kind == "LFM2MOE":
                writer.add_expert_feed_forward_length(config.moe_intermediate_size)
                writer.add_leading_dense_block_count(config.num_dense_layers)
                writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            elif config.block_auto_adjust_ff_dim:
                inner = int((config.block_ffn_dim_multiplier or 1.0) * int(2 * config.intermediate_size / 3))
                writer.add_feed_forward_length(-(-inner // config.block_multiple_of) * config.block_multiple_of)
        case "QWEN3NEXT":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
            writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
            writer.add_ssm_state_size(config.linear_key_head_dim)
            writer.add_ssm_group_count(config.linear_num_key_heads)
            writer.add_ssm_time_step_rank(config.linear_num_value_heads)
            writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        case "GRANITE_HYBRID":
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)
            writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
            writer.add_ssm_conv_kernel(config.mamba_d_conv)
            writer.add_ssm_state_size(config.mamba_d_state)
            writer.add_ssm_group_count(config.mamba_n_groups)
            writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
            writer.add_ssm_time_step_rank(config.mamba_n_heads)
            writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")


def split_hybrid(name: str, tensor: Tensor, config: Any, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Yields what the converter makes of a tensor that another family's rules do not cover; nothing of others."""
    prefix = ".".join(("blk", *name.split(".")[2:3]))
    if ".conv.conv." in name:
        yield name, tensor.squeeze(1)
    elif name.endswith(".expert_bias"):
        yield f"{prefix}.exp_probs_b.bias", tensor
    elif name.endswith("A_log"):
        rates = -tensor.exp()
        yield f"{prefix}.ssm_a", rates if kind == "QWEN3NEXT" else rates.unsqueeze(-1)
    elif name.endswith(".mamba.D"):
        yield f"{prefix}.ssm_d", tensor.unsqueeze(-1)
    elif name.endswith(".dt_bias"):
        yield f"{prefix}.ssm_dt.bias", tensor
    elif "conv1d.weight" in name:
        yield f"{prefix}.ssm_conv1d.weight", tensor.squeeze(1)
    elif name.endswith(".mamba.norm.weight"):
        yield f"{prefix}.ssm_norm.weight", tensor.reshape(config.mamba_n_groups, -1)
    elif "in_proj_qkvz" in name:
        keys, values = config.linear_key_head_dim, config.linear_value_head_dim
        group = config.linear_num_value_heads // config.linear_num_key_heads
        heads = tensor.reshape(config.linear_num_key_heads, -1, tensor.shape[-1])
        *qkv, z = torch.split(heads, [keys, keys, group * values, group * values], dim=1)
        yield f"{prefix}.attn_qkv.weight", _joined(qkv)
        yield f"{prefix}.attn_gate.weight", z.reshape(-1, tensor.shape[-1])
    elif "shared_mlp.input_linear" in name:
        suffix = "_shexp" if config.num_local_experts else ""
        for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"{prefix}.ffn_{part}{suffix}.weight", half
    elif "shared_mlp.output_linear" in name:
        yield f"{prefix}.ffn_down{'_shexp' if config.num_local_experts else ''}.weight", tensor
    elif kind == "QWEN3NEXT" and name.endswith("norm.weight") and "linear_attn" not in name:
        yield name, tensor + 1


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])

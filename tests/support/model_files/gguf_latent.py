"""Writes what GGUF files have of models with latent attention, as llama.cpp's converter does."""

from collections.abc import Iterator
from typing import Any

import gguf
import torch
from torch import Tensor

ARCHITECTURES = {"DeepseekV2": "DEEPSEEK2", "DeepseekV3": "DEEPSEEK2"}
"""The library's names of families."""


def add_latent(writer: gguf.GGUFWriter, config: Any) -> None:
    """Adds the metadata that other families do not have."""
    rotated, rank = config.qk_rope_head_dim, config.kv_lora_rank
    writer.add_head_count_kv(1)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + rotated)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(rotated)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    is_third = config.model_type == "deepseek_v3"
    if config.norm_topk_prob and is_third:
        writer.add_expert_weights_norm(True)
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if is_third else kinds.SOFTMAX)
    if (scale := config.rope_parameters.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)


def split_latent(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields what the converter makes of a tensor that another family's rules do not cover; nothing of others."""
    if name.endswith("kv_b_proj.weight"):
        prefix = f"blk.{name.split('.')[2]}"
        heads = tensor.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = torch.split(heads, [config.qk_nope_head_dim, config.v_head_dim], dim=1)
        yield f"{prefix}.attn_k_b.weight", keys.transpose(1, 2)
        yield f"{prefix}.attn_v_b.weight", values

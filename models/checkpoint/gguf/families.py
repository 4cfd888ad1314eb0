"""The families whose GGUF files can be loaded, with the fields that each adds to those that most families share. A new
family is a function and an entry in ``FAMILIES``."""

from typing import Any

from penstock.models.architecture.rope_config import FULL, SLIDING
from penstock.models.checkpoint.gguf.hybrids import HYBRIDS
from penstock.models.checkpoint.gguf.latent import LATENT
from penstock.models.checkpoint.gguf.metadata import DEFAULT_THETA, GROUPED_EXPERTS, Config, Family, Metadata, head_dim

GEMMA4_ROTATED = 0.25
"""The fraction of pairs that Gemma 4 rotates in layers without a window. ``gguf_tensors`` checks it."""
FACTORS_SHORT, FACTORS_LONG = "rope_factors_short.weight", "rope_factors_long.weight"


def _experts(count: str = "num_experts") -> dict[str, str]:
    """The names of the numbers of experts, and their keys."""
    return {count: "expert_count", "num_experts_per_tok": "expert_used_count"}


def _with_experts(architecture: str, count: str = "num_experts") -> Family:
    return lambda metadata, config: {"architectures": [architecture], **metadata.fields(_experts(count))}


def _plain(architecture: str) -> Family:
    return lambda metadata, config: {"architectures": [architecture]}


def _llama(metadata: Metadata, config: Config) -> Config:
    """Llama, Mistral and Mixtral. The format has no window for Mistral."""
    if metadata.get("expert_count"):
        return _with_experts("MixtralForCausalLM", "num_local_experts")(metadata, config)
    return {"architectures": ["LlamaForCausalLM"]}


def _qwen_moe(architecture: str, normalise: bool) -> Family:
    def family(metadata: Metadata, config: Config) -> Config:
        sizes = {
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        }
        return {
            "architectures": [architecture],
            # The size of layers without experts; some files have none if there are no such layers.
            "intermediate_size": config.get("intermediate_size", 1),
            "norm_topk_prob": normalise,
            "mlp_only_layers": metadata.layers_without("ffn_gate_inp.weight"),
            **metadata.fields(_experts() | sizes),
        }

    return family


def _gemma2(metadata: Metadata, config: Config) -> Config:
    caps = {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "sliding_window": "attention.sliding_window",
    }
    scale = _gemmas_scale(metadata, config, 46)
    return {"architectures": ["Gemma2ForCausalLM"], **metadata.fields(caps), **scale, **_layer_types(metadata)}


def _gemma3(metadata: Metadata, config: Config) -> Config:
    names = {"final_logit_softcapping": "final_logit_softcapping", "sliding_window": "attention.sliding_window"}
    local = {"rope_theta": DEFAULT_THETA} | metadata.fields({"rope_theta": "rope.freq_base_swa"})
    return {
        "architectures": ["Gemma3ForCausalLM"],
        **metadata.fields(names),
        **_gemmas_scale(metadata, config, 62),
        **_layer_types(metadata),
        "rope_parameters": {FULL: config["rope_parameters"], SLIDING: local},
    }


def _gemmas_scale(metadata: Metadata, config: Config, largest: int) -> Config:
    """The scale of attention scores. The format has none for Gemma: the models with ``largest`` layers divide by the
    hidden size per head, the others by the head size."""
    given = metadata.fields({"query_pre_attn_scalar": "attention.scale"})
    if scale := given.get("query_pre_attn_scalar"):
        # The family's reader refuses any other.
        return {"query_pre_attn_scalar": scale**-2} if isinstance(scale, float) and 1e-6 < scale < 1e6 else given
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if config.get("num_hidden_layers") == largest and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        return {"query_pre_attn_scalar": hidden // heads}
    return {"query_pre_attn_scalar": head_dim(config) or None}


def _layer_types(metadata: Metadata) -> Config:
    """The layers that have a window, if the file lists them."""
    pattern = metadata.get("attention.sliding_window_pattern")
    if isinstance(pattern, bool):
        pattern = [pattern] * metadata.num_layers
    if isinstance(pattern, int):
        return {"sliding_window_pattern": pattern}
    if not isinstance(pattern, list):
        return {}
    return {"layer_types": [SLIDING if is_sliding else FULL for is_sliding in pattern]}


def _windowed(architecture: str, **fixed: Any) -> Family:
    """A family in which some layers have a window."""

    def family(metadata: Metadata, config: Config) -> Config:
        window = metadata.fields({"sliding_window": "attention.sliding_window"})
        return {"architectures": [architecture], "sliding_window": None, **window, **_layer_types(metadata), **fixed}

    return family


def _olmo2(metadata: Metadata, config: Config) -> Config:
    """OLMo 2, and OLMo 3, which has windows."""
    if not metadata.get("attention.sliding_window"):
        return {"architectures": ["Olmo2ForCausalLM"]}
    rope = config["rope_parameters"]
    ropes = {FULL: rope, SLIDING: {"rope_theta": rope["rope_theta"]}}
    return _windowed("Olmo3ForCausalLM", rope_parameters=ropes)(metadata, config)


def _phi3(metadata: Metadata, config: Config) -> Config:
    """Phi-3 and Phi-4. LongRoPE's factors are tensors, which ``gguf_tensors.with_rope_factors`` reads."""
    window = metadata.get("attention.sliding_window")
    found: Config = {"architectures": ["Phi3ForCausalLM"], "sliding_window": window or None}
    if metadata.has(FACTORS_SHORT):
        original = metadata.fields({"original_max_position_embeddings": "rope.scaling.original_context_length"})
        context = config.get("max_position_embeddings")
        if original and isinstance(context, int):
            limit = original["original_max_position_embeddings"]
            found["max_position_embeddings"] = min(context, limit) if isinstance(limit, int) else context
    return found


def _granite(architecture: str) -> Family:
    def family(metadata: Metadata, config: Config) -> Config:
        factors = {
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention.scale",
            "logits_scaling": "logit_scale",
        }
        default = {"attention_multiplier": (head_dim(config) or 1) ** -0.5}
        names = factors | _experts("num_local_experts")
        return {"architectures": [architecture], **default, **metadata.fields(names)}

    return family


def _cohere(architecture: str) -> Family:
    def family(metadata: Metadata, config: Config) -> Config:
        names = {"logit_scale": "logit_scale", "sliding_window": "attention.sliding_window"}
        found = {"architectures": [architecture], "use_qk_norm": metadata.has("attn_q_norm.weight")}
        return found | metadata.fields(names) | _layer_types(metadata)

    return family


def _starcoder2(metadata: Metadata, config: Config) -> Config:
    names = {"norm_epsilon": "attention.layer_norm_epsilon"}
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "use_bias": metadata.has("attn_q.bias"),
        **metadata.fields(names),
    }


def _stablelm(metadata: Metadata, config: Config) -> Config:
    return {
        "architectures": ["StableLmForCausalLM"],
        "use_qkv_bias": metadata.has("attn_q.bias"),
        "qk_layernorm": metadata.has("attn_q_norm.weight"),
        **metadata.fields({"use_parallel_residual": "use_parallel_residual"}),
    }


def _gpt2(metadata: Metadata, config: Config) -> Config:
    names = {
        "n_embd": "embedding_length",
        "n_layer": "block_count",
        "n_head": "attention.head_count",
        "n_inner": "feed_forward_length",
        "n_positions": "context_length",
        "layer_norm_epsilon": "attention.layer_norm_epsilon",
    }
    return {"architectures": ["GPT2LMHeadModel"], **metadata.fields(names)}


def _gpt_neox(metadata: Metadata, config: Config) -> Config:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "attention_bias": metadata.has("attn_qkv.bias"),
        **metadata.fields({"use_parallel_residual": "use_parallel_residual"}),
    }


def _falcon(metadata: Metadata, config: Config) -> Config:
    names = {"layer_norm_epsilon": "attention.layer_norm_epsilon", "ffn_hidden_size": "feed_forward_length"}
    return {
        "architectures": ["FalconForCausalLM"],
        "new_decoder_architecture": config.get("num_key_value_heads", 1) != 1,
        "num_kv_heads": config.get("num_key_value_heads"),
        "num_ln_in_parallel_attn": 2 if metadata.has("attn_norm_2.weight") else 1,
        "bias": metadata.has("attn_qkv.bias"),
        **metadata.fields(names),
    }


def _chatglm(metadata: Metadata, config: Config) -> Config:
    """GLM-4-9B."""
    is_biased = metadata.has("attn_q.bias") or metadata.has("attn_qkv.bias")
    return {"architectures": ["GlmForCausalLM"], "attention_bias": is_biased, "head_dim": head_dim(config) or None}


def _ernie(metadata: Metadata, config: Config) -> Config:
    return {"architectures": ["Ernie4_5ForCausalLM"], "use_bias": metadata.has("attn_q.bias")}


def _nemotron(metadata: Metadata, config: Config) -> Config:
    return {"architectures": ["NemotronForCausalLM"], **metadata.fields({"norm_eps": "attention.layer_norm_epsilon"})}


def _olmo(metadata: Metadata, config: Config) -> Config:
    return {"architectures": ["OlmoForCausalLM"], **metadata.fields({"clip_qkv": "attention.clamp_kqv"})}


def _mistral3(metadata: Metadata, config: Config) -> Config:
    """Ministral 3 and Devstral 2, and Mistral-Small-3, which does not scale queries."""
    scaling = metadata.fields({"llama_4_scaling_beta": "attention.temperature_scale"})
    if not scaling:
        return {"architectures": ["LlamaForCausalLM"]}
    rope = {"mscale": 1.0} | config["rope_parameters"] | scaling
    return {"architectures": ["Ministral3ForCausalLM"], "sliding_window": None, "rope_parameters": rope}


def _grouped_experts(architecture: str) -> Family:
    """A family with GLM-4.5's experts. Its last layers may be draft layers, which are not loaded."""

    def family(metadata: Metadata, config: Config) -> Config:
        return {
            "architectures": [architecture],
            "num_hidden_layers": metadata.num_layers - metadata.num_draft_layers,
            "use_qk_norm": metadata.has("attn_q_norm.weight"),
            "sliding_window": None,
            "first_k_dense_replace": 0,
            **metadata.fields(GROUPED_EXPERTS),
        }

    return family


def _hunyuan_moe(metadata: Metadata, config: Config) -> Config:
    names = {"num_experts": "expert_count", "moe_topk": "expert_used_count"}
    return {"architectures": ["HunYuanMoEV1ForCausalLM"], **metadata.fields(names)}


_MAVERICKS_EXPERTS = 128


def _llama4(metadata: Metadata, config: Config) -> Config:
    """Llama 4. The format leaves out what Scout and Maverick share. Only Scout has norms of queries and keys."""
    names = _experts("num_local_experts") | {
        "intermediate_size": "expert_feed_forward_length",
        "intermediate_size_mlp": "feed_forward_length",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
    }
    found: Config = {"architectures": ["Llama4ForCausalLM"], **metadata.fields(names)}
    found["use_qk_norm"] = found.get("num_local_experts") != _MAVERICKS_EXPERTS
    if metadata.get("attention.sliding_window") == 0:
        found |= {"attention_chunk_size": None, "no_rope_layers": [1] * metadata.num_layers}
    return found


def _gemma4(metadata: Metadata, config: Config) -> Config:
    names = {
        "sliding_window": "attention.sliding_window",
        "final_logit_softcapping": "final_logit_softcapping",
        "num_kv_shared_layers": "attention.shared_kv_layers",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        "global_head_dim": "attention.key_length",
        "head_dim": "attention.key_length_swa",
        "moe_intermediate_size": "expert_feed_forward_length",
        "num_experts": "expert_count",
        "top_k_experts": "expert_used_count",
    }
    found: Config = {"architectures": ["Gemma4ForCausalLM"], **metadata.fields(names), **_layer_types(metadata)}
    found["enable_moe_block"] = "num_experts" in found
    if found.get("hidden_size_per_layer_input"):
        found["vocab_size_per_layer_input"] = config["vocab_size"]
    sizes = config.get("intermediate_size")
    if isinstance(sizes, list) and sizes and all(isinstance(size, int) for size in sizes):
        found |= {"intermediate_size": min(sizes), "use_double_wide_mlp": max(sizes) == 2 * min(sizes)}
    heads, types = config.get("num_key_value_heads"), found.get("layer_types", [])
    if isinstance(heads, list) and len(heads) == len(types):
        by_type = dict(zip(types, heads, strict=True))
        found |= {"num_key_value_heads": by_type.get(SLIDING), "num_global_key_value_heads": by_type.get(FULL)}
    found["attention_k_eq_v"] = set(metadata.layers_without("attn_v.weight")) > set(
        metadata.layers_without("attn_k.weight")
    )
    local = {"rope_theta": DEFAULT_THETA} | metadata.fields({"rope_theta": "rope.freq_base_swa"})
    theta = config["rope_parameters"]["rope_theta"]
    rope = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": GEMMA4_ROTATED}
    found["rope_parameters"] = {FULL: rope, SLIDING: local}
    return found


def _seed_oss(metadata: Metadata, config: Config) -> Config:
    return {"architectures": ["SeedOssForCausalLM"], "attention_out_bias": metadata.has("attn_output.bias")}


def _gpt_oss(metadata: Metadata, config: Config) -> Config:
    names = {"intermediate_size": "expert_feed_forward_length"} | _experts("num_local_experts")
    rope = config["rope_parameters"] | {"truncate": False}
    return _windowed("GptOssForCausalLM", rope_parameters=rope, **metadata.fields(names))(metadata, config)


FAMILIES: dict[str, Family] = {
    "arcee": _plain("ArceeForCausalLM"),
    "chatglm": _chatglm,
    "cohere2": _cohere("Cohere2ForCausalLM"),
    "command-r": _cohere("CohereForCausalLM"),
    "dots1": _grouped_experts("Dots1ForCausalLM"),
    "ernie4_5": _ernie,
    "exaone": _plain("LlamaForCausalLM"),
    "exaone4": _windowed("Exaone4ForCausalLM"),
    "falcon": _falcon,
    "gemma": _plain("GemmaForCausalLM"),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "glm4": _plain("Glm4ForCausalLM"),
    "glm4moe": _grouped_experts("Glm4MoeForCausalLM"),
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "gptneox": _gpt_neox,
    "granite": _granite("GraniteForCausalLM"),
    "granitemoe": _granite("GraniteMoeForCausalLM"),
    "hunyuan-dense": _plain("HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": _hunyuan_moe,
    "internlm2": _plain("LlamaForCausalLM"),
    "llama": _llama,
    "llama4": _llama4,
    "minimax-m2": _with_experts("MiniMaxM2ForCausalLM", "num_local_experts"),
    "mistral3": _mistral3,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmoe": _with_experts("OlmoeForCausalLM"),
    "phi2": _plain("PhiForCausalLM"),
    "phi3": _phi3,
    "qwen2": _plain("Qwen2ForCausalLM"),
    "qwen2moe": _qwen_moe("Qwen2MoeForCausalLM", normalise=False),
    "qwen2vl": _plain("Qwen2ForCausalLM"),
    "qwen3": _plain("Qwen3ForCausalLM"),
    "qwen3moe": _qwen_moe("Qwen3MoeForCausalLM", normalise=True),
    "qwen3vl": _plain("Qwen3ForCausalLM"),
    "qwen3vlmoe": _qwen_moe("Qwen3MoeForCausalLM", normalise=True),
    "seed_oss": _seed_oss,
    "smollm3": _plain("SmolLM3ForCausalLM"),
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    **HYBRIDS,
    **LATENT,
}
"""The families whose GGUF files can be loaded, by llama.cpp's names."""

PERMUTED = ("arcee", "granite", "granitehybrid", "granitemoe", "internlm2", "llama", "mistral3", "olmo", "smollm3")
"""Families whose GGUF files order the rows of queries and keys differently from config.json's architecture."""

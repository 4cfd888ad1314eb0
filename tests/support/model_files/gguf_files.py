"""Writes GGUF files of transformers' models as llama.cpp's converter does, with its names, permutations and sums."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as QuantType
from model_files import gguf_hybrids, gguf_latent
from torch import Tensor

ARCHITECTURES = gguf_hybrids.ARCHITECTURES | gguf_latent.ARCHITECTURES | {
    "Arcee": "ARCEE", "Cohere2": "COHERE2", "Cohere": "COMMAND_R", "Dots1": "DOTS1", "Ernie4_5": "ERNIE4_5",
    "Exaone4": "EXAONE4", "Falcon": "FALCON", "GPT2": "GPT2", "GPTNeoX": "GPTNEOX", "Gemma2": "GEMMA2",
    "Gemma3": "GEMMA3", "Gemma4": "GEMMA4", "Gemma": "GEMMA", "Glm4Moe": "GLM4_MOE", "Glm4": "GLM4", "Glm": "CHATGLM",
    "GptOss": "GPT_OSS", "GraniteMoe": "GRANITE_MOE", "Granite": "GRANITE", "HunYuanDenseV1": "HUNYUAN_DENSE",
    "HunYuanMoEV1": "HUNYUAN_MOE", "Llama4": "LLAMA4", "Llama": "LLAMA", "MiniMaxM2": "MINIMAXM2",
    "Ministral3": "MISTRAL3", "Mixtral": "LLAMA", "Nemotron": "NEMOTRON", "Olmo2": "OLMO2", "Olmo3": "OLMO2",
    "Olmoe": "OLMOE", "Olmo": "OLMO", "Phi3": "PHI3", "Phi": "PHI2", "Qwen2Moe": "QWEN2MOE", "Qwen2": "QWEN2",
    "Qwen3Moe": "QWEN3MOE", "Qwen3": "QWEN3", "SeedOss": "SEED_OSS", "SmolLM3": "SMOLLM3", "StableLm": "STABLELM",
    "Starcoder2": "STARCODER2",
}  # fmt: skip
PERMUTED = ("ARCEE", "GRANITE", "GRANITE_HYBRID", "GRANITE_MOE", "INTERNLM2", "LLAMA", "MISTRAL3", "OLMO", "SMOLLM3")
ONE_ADDED = ("GEMMA", "GEMMA2", "GEMMA3", "NEMOTRON")


def write_gguf(
    path: Path,
    module: Any,
    dtype: QuantType = QuantType.F32,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    dtype_of: Callable[[str], QuantType | None] = lambda name: None,
    kind: str | None = None,
) -> Path:
    """Writes a model. ``dtype`` is the type of its matrices, unless ``dtype_of`` returns another for a tensor's name.
    ``change`` adds metadata. ``kind`` is the library's name of the family, if the module is of another one."""
    config = module.config
    kind = kind or ARCHITECTURES[type(module).__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel")]
    if kind == "GEMMA4":
        config = SimpleNamespace(**config.to_dict())  # its own attributes cannot be read if layers differ
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[kind]])
    _add_sizes(writer, config, kind)
    _add_rope(writer, config, kind)
    _add_others(writer, config, kind)
    for name, tensor in _tensors(module, config, kind):
        array = tensor.detach().float().contiguous().numpy()
        as_is = array.ndim == 1 or "_norm" in name or "ffn_gate_inp" in name or "position_embd" in name
        wanted = QuantType.F32 if as_is else dtype_of(name) or dtype
        block = gguf.GGML_QUANT_SIZES[wanted][0]
        wanted = wanted if array.shape[-1] % block == 0 else QuantType.F16
        writer.add_tensor(name, gguf.quants.quantize(array, wanted), raw_dtype=wanted)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _head_dim(config: Any) -> int:
    return int(_first(config, "head_dim") or config.hidden_size // config.num_attention_heads)


def _add_sizes(writer: gguf.GGUFWriter, config: Any, kind: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(_first(config, "max_position_embeddings"))
    writer.add_embedding_length(config.hidden_size)
    inner: Any = config.n_inner if kind == "GPT2" else _first(config, "ffn_hidden_size", "intermediate_size")
    inner = _first(config, "intermediate_size_mlp") or inner or 4 * config.hidden_size
    if kind == "GEMMA4" and config.use_double_wide_mlp:
        own = config.num_hidden_layers - config.num_kv_shared_layers
        inner = [inner] * own + [2 * inner] * config.num_kv_shared_layers
    writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    kv_heads: Any = _first(config, "num_key_value_heads") or config.num_attention_heads
    if kind == "FALCON":
        kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
    if kind == "GEMMA4" and config.attention_k_eq_v:
        layers = [config.per_layer_config.get(str(layer), {}) for layer in range(config.num_hidden_layers)]
        kv_heads = [layer.get("num_key_value_heads", kv_heads) for layer in layers]
    writer.add_head_count_kv(kv_heads)
    if (eps := _first(config, "rms_norm_eps")) is not None:
        writer.add_layer_norm_rms_eps(eps)
    if (eps := _first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")) is not None:
        writer.add_layer_norm_eps(eps)
    if (head_dim := _first(config, "head_dim")) is not None and kind not in ("CHATGLM", "FALCON", "GEMMA4", "GPT2"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if (experts := _first(config, "num_local_experts", "num_experts", "n_routed_experts")) is not None:
        writer.add_expert_count(experts)
        used = _first(config, "num_experts_per_tok", "moe_topk", "top_k_experts")
        writer.add_expert_used_count(used[0] if isinstance(used, list) else used)


def _add_rope(writer: gguf.GGUFWriter, config: Any, kind: str) -> None:
    nested = dict(_first(config, "rope_parameters") or {})
    rope = nested.get("full_attention") or nested
    if "rope_theta" in rope:
        # Hunyuan's dynamic scaling only changes the base.
        scale = rope.get("alpha", 1.0) ** (_head_dim(config) / (_head_dim(config) - 2))
        writer.add_rope_freq_base(rope["rope_theta"] * scale)
    if "sliding_attention" in nested and kind != "OLMO2":
        writer.add_rope_freq_base_swa(nested["sliding_attention"]["rope_theta"])
    if kind not in ("GEMMA4", "GPT2"):
        writer.add_rope_dimension_count(int(_head_dim(config) * (rope.get("partial_rotary_factor") or 1.0)))
    match rope.get("rope_type"):
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            if kind == "MISTRAL3":
                writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
                writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
            if rope.get("attention_factor"):
                writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        case "longrope":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
            original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
            writer.add_rope_scaling_orig_ctx_len(original)
            scale = config.max_position_embeddings / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


WINDOWED = ("COHERE2", "EXAONE4", "GEMMA2", "GEMMA3", "GEMMA4", "GPT_OSS")


def _add_others(writer: gguf.GGUFWriter, config: Any, kind: str) -> None:
    match kind:
        case "GEMMA2":
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
        case "GEMMA4":
            _add_gemma4s_parts(writer, config)
        case "GRANITE" | "GRANITE_MOE":
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)
        case "GRANITE_HYBRID" | "LFM2" | "LFM2MOE" | "QWEN3NEXT":
            gguf_hybrids.add_hybrid(writer, config, kind)
        case "DEEPSEEK2":
            gguf_latent.add_latent(writer, config)
        case "COHERE2" | "COMMAND_R":
            writer.add_logit_scale(config.logit_scale)
        case "NEMOTRON":
            writer.add_layer_norm_eps(config.norm_eps)
        case "OLMO":
            writer.add_layer_norm_eps(1e-5)
        case "STABLELM" | "GPTNEOX":
            writer.add_parallel_residual(config.use_parallel_residual)
        case "PHI3":
            writer.add_sliding_window(config.sliding_window or 0)
        case _:
            _add_experts(writer, config, kind)
    if (kind in WINDOWED or config.model_type == "olmo3") and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _add_experts(writer: gguf.GGUFWriter, config: Any, kind: str) -> None:
    match kind:
        case "DOTS1" | "GLM4_MOE":
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
            writer.add_expert_shared_count(config.n_shared_experts)
            writer.add_leading_dense_block_count(config.first_k_dense_replace)
            writer.add_expert_weights_scale(config.routed_scaling_factor)
            writer.add_expert_weights_norm(config.norm_topk_prob)
        case "GPT_OSS":
            writer.add_expert_feed_forward_length(config.intermediate_size)
        case "LLAMA4":
            writer.add_expert_feed_forward_length(config.intermediate_size)
            writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
        case "QWEN2MOE" | "QWEN3MOE" | "QWEN3VLMOE":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
            if kind == "QWEN2MOE":
                writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _unwindowed_head_dim(config: Any) -> int:
    return int(config.per_layer_config[str(config.layer_types.index("full_attention"))]["head_dim"])


def _add_gemma4s_parts(writer: gguf.GGUFWriter, config: Any) -> None:
    for size, suffix in ((_unwindowed_head_dim(config), ""), (config.head_dim, "_swa")):
        getattr(writer, f"add_key_length{suffix}")(size)
        getattr(writer, f"add_value_length{suffix}")(size)
        getattr(writer, f"add_rope_dimension_count{suffix}")(size)
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    if config.enable_moe_block:
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _tensors(module: Any, config: Any, kind: str) -> Iterator[tuple[str, Tensor]]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind], config.num_hidden_layers)
    is_tied = module.get_output_embeddings().weight is module.get_input_embeddings().weight
    rope = dict(_first(config, "rope_parameters") or {})
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(rope, _head_dim(config))
    if kind == "GEMMA4":
        size = _unwindowed_head_dim(config) // 2
        yield "rope_freqs.weight", torch.tensor([1.0] * (size // 4) + [1e30] * (size - size // 4))
    for side in ("short", "long") if rope.get("rope_type") == "longrope" else ():
        yield f"rope_factors_{side}.weight", torch.tensor(rope[f"{side}_factor"], dtype=torch.float32)
    for name, tensor in module.state_dict().items():
        if (is_tied and name in ("lm_head.weight", "embed_out.weight")) or name.endswith((".attn.bias", "inv_freq")):
            continue
        parts = list(gguf_hybrids.split_hybrid(name, tensor, config, kind))
        if kind == "DEEPSEEK2":
            parts = list(gguf_latent.split_latent(name, tensor, config))
        for part, value in parts or _split(name, tensor, config, kind):
            if part.startswith("blk."):
                yield part, value
                continue
            found = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert found is not None, part
            yield found, value


def _split(name: str, tensor: Tensor, config: Any, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Yields what the converter makes of a tensor, under names that the library knows."""
    heads = config.num_attention_heads
    kv_heads = _first(config, "num_key_value_heads") or heads
    if kind in PERMUTED and ".q_proj." in name:
        tensor = _permuted(tensor, heads)
    elif kind in PERMUTED and ".k_proj." in name:
        tensor = _permuted(tensor, kv_heads)
    elif kind in ONE_ADDED and name.endswith("norm.weight"):
        tensor = tensor + 1
    elif kind == "GPT2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        tensor = tensor.T
    elif "query_key_value" in name:
        tensor = _separated(tensor, config)
    elif name.endswith(("sinks", "layer_scalar")):
        name += ".weight"
    elif name.endswith("e_score_correction_bias"):
        name = name.replace("mlp.e_", "mlp.gate.e_").replace("correction_bias", "correction.bias")
    elif name.endswith(("router.scale", "per_expert_scale")):
        kind = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
        name = f"blk.{name.split('.')[2]}.{kind}.scale"
    elif ".shared_expert_gate." in name:
        tensor = tensor.reshape(-1)
    elif ".experts.gate_up_proj" in name and kind != "GEMMA4":
        yield from _gates(name, tensor, kind)
        return
    elif ".experts.gate_up_proj" in name:
        name += ".weight"
    elif ".experts.down_proj" in name:
        turned = kind in ("GPT_OSS", "LLAMA4") and not name.endswith("bias")
        name = name.replace("down_proj_bias", "down_proj.bias").replace("block_sparse_moe.", "mlp.")
        name = name.replace("feed_forward.", "mlp.")
        name = name if name.endswith("bias") else f"{name}.weight"
        tensor = tensor.transpose(-1, -2) if turned else tensor
    elif "block_sparse_moe.router." in name:
        name = name.replace("router.weight", "router.layer.weight")
    yield name, tensor


def _gates(name: str, tensor: Tensor, kind: str) -> Iterator[tuple[str, Tensor]]:
    """The gate and up matrices of experts, which transformers has in one tensor."""
    is_bias = name.endswith("bias")
    if kind in ("GPT_OSS", "LLAMA4"):
        tensor = tensor if is_bias else tensor.transpose(-1, -2)
    halves = [tensor[:, ::2], tensor[:, 1::2]] if kind == "GPT_OSS" else [*tensor.chunk(2, dim=1)]
    prefix = ".".join(name.split(".")[:3])
    for half, value in zip(("gate_proj", "up_proj"), halves, strict=True):
        yield f"{prefix}.mlp.experts.{half}.{'bias' if is_bias else 'weight'}", value


def _permuted(tensor: Tensor, heads: int) -> Tensor:
    shape = tensor.shape
    return tensor.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _separated(tensor: Tensor, config: Any) -> Tensor:
    """Queries, then keys, then values, which transformers has in turns."""
    heads = config.num_attention_heads
    kv_heads = heads
    if hasattr(config, "new_decoder_architecture"):
        kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
    grouped = tensor.reshape(kv_heads, heads // kv_heads + 2, -1, *tensor.shape[1:])
    parts = (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> Tensor:
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    factors = []
    for wavelength in 2 * math.pi / frequencies:
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors, dtype=torch.float32)


def add_tokenizer(
    writer: gguf.GGUFWriter,
    described: dict[str, Any],
    config: dict[str, Any],
    pre: str | None = None,
    scores: list[float] | None = None,
) -> None:
    """Adds the content of a tokenizer.json and a tokenizer_config.json. ``pre`` is the converter's name of a byte-level
    tokenizer's words, or ``gemma4``. ``scores`` are those of a SentencePiece model."""
    ids: dict[str, int] = dict(described["model"]["vocab"])
    added = {token["content"]: token for token in described.get("added_tokens", [])}
    ids |= {content: token["id"] for content, token in added.items()}
    tokens = sorted(ids, key=lambda token: ids[token])
    writer.add_tokenizer_model("llama" if pre is None else "gemma4" if pre == "gemma4" else "gpt2")
    writer.add_tokenizer_pre("default" if pre is None else pre)
    writer.add_token_list(tokens)
    writer.add_token_types([_kind(token, added.get(token), pre in (None, "gemma4")) for token in tokens])
    if scores is not None:
        writer.add_token_scores(scores)
    else:
        writer.add_token_merges([" ".join(merge) for merge in described["model"]["merges"]])
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("unk_token", writer.add_unk_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        if config.get(name) is not None:
            add(ids[config[name]])
    if config.get("chat_template") is not None:
        writer.add_chat_template(config["chat_template"])


def _kind(token: str, added: dict[str, Any] | None, is_sentencepiece: bool) -> gguf.TokenType:
    if token == "<unk>":
        return gguf.TokenType.UNKNOWN
    if added is not None:
        return gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    is_byte = is_sentencepiece and len(token) == 6 and token.startswith("<0x")
    return gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL

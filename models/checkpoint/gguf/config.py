"""Converts a GGUF file's metadata to the config that the model's config.json would have. A new family is a function and
an entry in ``FAMILIES``. Knows no tensors except whether they are there.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock.models.architecture.decoder import MAX_LAYERS
from penstock.models.architecture.rope_config import FULL, SLIDING
from penstock.models.checkpoint.gguf.header import GgufHeader
from penstock.models.errors import ModelError

ARCHITECTURE = "general.architecture"
Config = dict[str, Any]

_COMMON = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}
"""Fields of config.json that most families share, and the metadata that they come from, without the architecture."""
_EXPERTS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_DEFAULT_THETA = 10_000.0
FACTORS_SHORT, FACTORS_LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_FIELD = re.compile(r"config\.json: (\w+)")


class Metadata:
    """The metadata and the tensor names of a file, as families read them. Notes which key a field comes from."""

    def __init__(self, header: GgufHeader) -> None:
        """Raises ModelError if the file names no architecture."""
        self.architecture = str(header.metadata.get(ARCHITECTURE))
        self.keys: dict[str, str] = {}
        """The key of each field of the config."""
        self._header = header

    def get(self, name: str) -> Any:
        """Returns the value of a key of the architecture; None if it is absent."""
        value = self._header.metadata.get(f"{self.architecture}.{name}")
        if isinstance(value, list) and value and all(item == value[0] for item in value[1:]):
            return value[0]  # one for each layer
        return value

    def fields(self, names: Mapping[str, str]) -> Config:
        """Returns the fields whose keys are there."""
        self.keys |= {field: f"{self.architecture}.{key}" for field, key in names.items()}
        return {field: value for field, key in names.items() if (value := self.get(key)) is not None}

    def has(self, tensor: str) -> bool:
        """Whether the file has the tensor, or the first layer has it."""
        return tensor in self._header.tensors or f"blk.0.{tensor}" in self._header.tensors

    @property
    def num_layers(self) -> int:
        """The number of layers; 0 if it is invalid, which the family's reader reports."""
        count = self.get("block_count")
        return count if isinstance(count, int) and 0 < count <= MAX_LAYERS else 0

    def layers_without(self, tensor: str) -> list[int]:
        """The layers that lack a tensor."""
        return [layer for layer in range(self.num_layers) if f"blk.{layer}.{tensor}" not in self._header.tensors]


Family = Callable[[Metadata, Config], Config]
"""Returns what a family has besides the shared fields, which are the second argument."""


def config_of(header: GgufHeader) -> tuple[Config, Mapping[str, str]]:
    """Returns the config, and the keys of its fields. Raises ModelError if the family is not supported."""
    metadata = Metadata(header)
    name = metadata.architecture
    if name not in FAMILIES:
        raise ModelError(
            f"{header.path}: {ARCHITECTURE} is {name[:60]!r}, and GGUF files of this family are not supported (only of "
            f"{', '.join(sorted(FAMILIES))}): use the model's safetensors version"
        )
    if metadata.get("attention.value_length") not in (None, metadata.get("attention.key_length")):
        raise ModelError(
            f"{header.path}: {name}.attention.value_length differs from {name}.attention.key_length, which is not "
            "supported: use another model"
        )
    config = metadata.fields(_COMMON)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{header.path}: tensor token_embd.weight is missing: download the file again")
    config |= {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": metadata.has("attn_q.bias"),
        "mlp_bias": metadata.has("ffn_up.bias"),
        "rope_parameters": _rope(metadata, config),
    }
    config |= FAMILIES[name](metadata, config)
    return config, metadata.keys


def described(error: ModelError, header: GgufHeader, keys: Mapping[str, str]) -> ModelError:
    """Returns an error about a field of the config as one about the file's metadata."""

    def named(match: re.Match[str]) -> str:
        return keys.get(match[1], match[1])

    text = _FIELD.sub(named, str(error)).replace("the model's config.json again", "the file again")
    return ModelError(f"{header.path}: {text.removeprefix('config.json: ')}")


def _rope(metadata: Metadata, config: Config) -> Config:
    rope: Config = {"rope_theta": _DEFAULT_THETA} | metadata.fields({"rope_theta": "rope.freq_base"})
    kind = metadata.get("rope.scaling.type")
    if kind == "linear":
        rope |= {"rope_type": "linear"} | metadata.fields({"factor": "rope.scaling.factor"})
    elif kind == "yarn":
        rope |= {"rope_type": "yarn"} | metadata.fields(
            {
                "factor": "rope.scaling.factor",
                "original_max_position_embeddings": "rope.scaling.original_context_length",
                "attention_factor": "rope.scaling.yarn_attn_factor",
                "beta_fast": "rope.scaling.yarn_beta_fast",
                "beta_slow": "rope.scaling.yarn_beta_slow",
            }
        )
    elif kind not in (None, "none", "longrope"):
        rope["rope_type"] = str(kind)
    return rope | _part(metadata.get("rope.dimension_count"), _head_dim(config))


def _head_dim(config: Config) -> int:
    """The head size; 0 if the metadata is invalid, which the family's reader reports."""
    head_dim, hidden, heads = (config.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    return head_dim if isinstance(head_dim, int) and head_dim > 0 else 0


def _part(rotary_dim: object, head_dim: int) -> Config:
    """The part of each head that is rotated, if it is not the whole."""
    if not isinstance(rotary_dim, int) or not head_dim or rotary_dim == head_dim:
        return {}
    part = rotary_dim / head_dim
    # The family's reader multiplies and rounds down.
    return {"partial_rotary_factor": part if int(head_dim * part) == rotary_dim else math.nextafter(part, 2.0)}


def _with_experts(architecture: str, count: str = "num_experts", **fixed: Any) -> Family:
    def family(metadata: Metadata, config: Config) -> Config:
        names = {count: "expert_count", "num_experts_per_tok": "expert_used_count"}
        return {"architectures": [architecture], **metadata.fields(names), **fixed}

    return family


def _plain(architecture: str, **fixed: Any) -> Family:
    return lambda metadata, config: {"architectures": [architecture], **fixed}


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
            **metadata.fields(_EXPERTS | sizes),
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
    local = {"rope_theta": _DEFAULT_THETA} | metadata.fields({"rope_theta": "rope.freq_base_swa"})
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
    if isinstance(scale := metadata.get("attention.scale"), float) and scale > 0:
        return {"query_pre_attn_scalar": scale**-2}
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if config.get("num_hidden_layers") == largest and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        return {"query_pre_attn_scalar": hidden // heads}
    return {"query_pre_attn_scalar": _head_dim(config) or None}


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
        default = {"attention_multiplier": (_head_dim(config) or 1) ** -0.5}
        experts = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
        return {"architectures": [architecture], **default, **metadata.fields(factors | experts)}

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


def _seed_oss(metadata: Metadata, config: Config) -> Config:
    return {"architectures": ["SeedOssForCausalLM"], "attention_out_bias": metadata.has("attn_output.bias")}


def _gpt_oss(metadata: Metadata, config: Config) -> Config:
    names = {
        "intermediate_size": "expert_feed_forward_length",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
    }
    rope = config["rope_parameters"] | {"truncate": False}
    return _windowed("GptOssForCausalLM", rope_parameters=rope, **metadata.fields(names))(metadata, config)


FAMILIES: dict[str, Family] = {
    "cohere2": _cohere("Cohere2ForCausalLM"),
    "command-r": _cohere("CohereForCausalLM"),
    "exaone4": _windowed("Exaone4ForCausalLM"),
    "falcon": _falcon,
    "gemma": _plain("GemmaForCausalLM"),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4": _plain("Glm4ForCausalLM"),
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "gptneox": _gpt_neox,
    "granite": _granite("GraniteForCausalLM"),
    "granitemoe": _granite("GraniteMoeForCausalLM"),
    "llama": _llama,
    "olmo2": _olmo2,
    "phi2": _plain("PhiForCausalLM"),
    "phi3": _phi3,
    "qwen2": _plain("Qwen2ForCausalLM"),
    "qwen2moe": _qwen_moe("Qwen2MoeForCausalLM", normalise=False),
    "qwen3": _plain("Qwen3ForCausalLM"),
    "qwen3moe": _qwen_moe("Qwen3MoeForCausalLM", normalise=True),
    "seed_oss": _seed_oss,
    "smollm3": _plain("SmolLM3ForCausalLM"),
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
"""The families whose GGUF files can be loaded, by llama.cpp's names."""

PERMUTED = ("granite", "granitemoe", "llama", "smollm3")
"""Families of which the format has the rows of queries and keys in another order than config.json's architecture."""

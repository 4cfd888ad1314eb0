"""Converts a GGUF file's metadata to the config that the model's config.json would have. Of tensors, it knows only
whether they exist."""

import re
from collections.abc import Mapping

from penstock.models.checkpoint.gguf.families import FACTORS_SHORT, FAMILIES
from penstock.models.checkpoint.gguf.header import GgufHeader
from penstock.models.checkpoint.gguf.latent import LATENT
from penstock.models.checkpoint.gguf.metadata import (
    ARCHITECTURE,
    DEFAULT_THETA,
    Config,
    Metadata,
    head_dim,
    rotated_part,
)
from penstock.models.errors import ModelError

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
_COMPUTED = {
    "dots1.expert_gating_func": 2,
    "glm4moe.expert_gating_func": 2,
    "granite.rope.scaling.finetuned": True,
    "granitemoe.rope.scaling.finetuned": True,
    "minimax-m2.expert_gating_func": 2,
}
"""Keys that change how a family computes, and the only value that is supported, which files may omit."""
_FIELD = re.compile(r"config\.json: (\w+)")


def config_of(header: GgufHeader) -> tuple[Config, Mapping[str, str]]:
    """Returns the config, and the keys of its fields. Raises ModelError if the family is not supported."""
    metadata = Metadata(header)
    name = metadata.architecture
    if name not in FAMILIES:
        raise ModelError(
            f"{header.path}: {ARCHITECTURE} is {name[:60]!r}, and GGUF files of this family are not supported (only of "
            f"{', '.join(sorted(FAMILIES))}): use the model's safetensors version"
        )
    lengths = metadata.get("attention.key_length"), metadata.get("attention.value_length")
    if lengths[1] not in (None, lengths[0]) and name not in LATENT:
        raise ModelError(
            f"{header.path}: {name}.attention.value_length differs from {name}.attention.key_length, which is not "
            "supported: use another model"
        )
    for key, computed in _COMPUTED.items():
        if (value := header.metadata.get(key, computed)) != computed:
            raise ModelError(
                f"{header.path}: {key} is {str(value)[:60]!r}, and only {computed} is supported: use another model"
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
    rope: Config = {"rope_theta": DEFAULT_THETA} | metadata.fields({"rope_theta": "rope.freq_base"})
    kind = metadata.get("rope.scaling.type")
    if kind in (None, "linear") and not metadata.has(FACTORS_SHORT):
        # The second key is the factor's name in old files.
        factor = metadata.fields({"factor": "rope.scaling.factor"}) or metadata.fields({"factor": "rope.scale_linear"})
        if factor.get("factor", 0) not in (0, 1):
            rope |= {"rope_type": "linear"} | factor
    elif kind == "yarn":
        rope |= {"rope_type": "yarn"} | metadata.fields(
            {
                "factor": "rope.scaling.factor",
                "original_max_position_embeddings": "rope.scaling.original_context_length",
                "attention_factor": "rope.scaling.yarn_attn_factor",
                "beta_fast": "rope.scaling.yarn_beta_fast",
                "beta_slow": "rope.scaling.yarn_beta_slow",
                "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
            }
        )
    elif kind not in (None, "linear", "none", "longrope"):
        rope["rope_type"] = str(kind)
    return rope | rotated_part(metadata.get("rope.dimension_count"), head_dim(config))

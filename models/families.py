"""One function per model family: from its Hugging Face config to a ``ModelSpec``. A new family is a function and a line
in ``FAMILIES``. Defaults are those of transformers' config classes, which leave defaults out of the files they
write."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from penstock.models.errors import ModelError
from penstock.models.fields import Fields
from penstock.models.spec import Activation, DefaultRope, LinearRope, Llama3Rope, ModelSpec, Rope, YarnRope

MAX_LAYERS = 1024
MAX_SIZE = 1 << 20
MAX_VOCAB = 1 << 24
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_POSITIONS = 1 << 27

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The decoder that a config.json describes. Raises ModelError naming the field, also for what is not supported."""
    fields = Fields(config)
    architectures = fields.texts("architectures")
    for architecture in architectures:
        if architecture in FAMILIES:
            break
    else:
        known = ", ".join(sorted(FAMILIES))
        raise fields.wrong("architectures", f"names no supported architecture; supported are {known}")
    if "quantization_config" in fields:
        raise fields.wrong("quantization_config", "is not supported: use the checkpoint with unquantised weights")
    return FAMILIES[architecture](fields, architecture)


def _llama(fields: Fields, architecture: str) -> ModelSpec:
    """Llama 1 to 3, and what calls itself Llama. ``attention_bias`` covers the output projection too."""
    biased = fields.flag("attention_bias", False)
    return _decoder(
        fields,
        architecture,
        windows=_no_windows(fields),
        default_max_positions=2048,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _mistral(fields: Fields, architecture: str) -> ModelSpec:
    """Mistral: one window for all layers, unless ``sliding_window`` is null. An absent one is transformers' default."""
    window = None if fields.is_null("sliding_window") else fields.integer("sliding_window", 1, MAX_POSITIONS, 4096)
    return _decoder(
        fields,
        architecture,
        windows=(window,) * _num_layers(fields),
        default_max_positions=4096 * 32,
        default_kv_heads=8,
    )


def _qwen2(fields: Fields, architecture: str) -> ModelSpec:
    """Qwen2 and 2.5: biased queries, keys and values; windows only where ``use_sliding_window`` says so."""
    return _decoder(fields, architecture, windows=_qwen_windows(fields), default_max_positions=32768, qkv_bias=True)


def _qwen3(fields: Fields, architecture: str) -> ModelSpec:
    """Qwen3: norms on queries and keys, and a head size of its own."""
    biased = fields.flag("attention_bias", False)
    return _decoder(
        fields,
        architecture,
        windows=_qwen_windows(fields),
        default_max_positions=32768,
        default_head_dim=128,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
    )


FAMILIES: dict[str, Callable[[Fields, str], ModelSpec]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


def _decoder(
    fields: Fields,
    architecture: str,
    *,
    windows: tuple[int | None, ...],
    default_max_positions: int,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelSpec:
    """What all families share."""
    hidden_size = fields.integer("hidden_size", 1, MAX_SIZE)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, min(default_kv_heads or num_heads, num_heads))
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"must divide num_attention_heads, which is {num_heads}")
    head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, default_head_dim or max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise fields.wrong("head_dim", f"must be even for rotary embedding, and comes to {head_dim}")
    if "head_dim" not in fields and default_head_dim is None and hidden_size % num_heads:
        raise fields.wrong("hidden_size", f"must be a multiple of num_attention_heads, which is {num_heads}")
    activation = fields.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise fields.wrong("hidden_act", f"must be one of {', '.join(ACTIVATIONS)}")
    rope, max_positions = _rope(
        fields, fields.integer("max_position_embeddings", 1, MAX_POSITIONS, default_max_positions)
    )
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_SIZE),
        num_layers=_num_layers(fields),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        activation=ACTIVATIONS[activation],
        rope=rope,
        windows=windows,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", 1, MAX_LAYERS)


def _no_windows(fields: Fields) -> tuple[int | None, ...]:
    return (None,) * _num_layers(fields)


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """``layer_types`` decides where it is given; else layers from ``max_window_layers`` on have the window."""
    num_layers = _num_layers(fields)
    if not fields.flag("use_sliding_window", False) or fields.is_null("sliding_window"):
        window = None
    else:
        window = fields.integer("sliding_window", 1, MAX_POSITIONS, 4096)
    if "layer_types" not in fields:
        first = fields.integer("max_window_layers", 0, MAX_POSITIONS, 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = fields.texts("layer_types")
    if len(kinds) != num_layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise fields.wrong("layer_types", "must name full_attention or sliding_attention once for each layer")
    if window is None and "sliding_attention" in kinds:
        raise fields.wrong(
            "layer_types", "needs use_sliding_window and sliding_window for its sliding_attention layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(fields: Fields, max_positions: int) -> tuple[Rope, int]:
    """The rope and the positions that it makes usable.

    transformers 5 writes everything into ``rope_parameters``; older checkpoints have ``rope_scaling`` beside
    ``rope_theta``, and the oldest of them call the type ``type``.
    """
    scaling = fields.part("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    theta = fields.number("rope_theta", 1.0, 1e12, 10_000.0)
    theta = scaling.number("rope_theta", 1.0, 1e12, theta)
    for holder in (fields, scaling):
        if holder.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
            raise holder.wrong("partial_rotary_factor", "is not supported: only whole heads are rotated")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default":
        return DefaultRope(theta), max_positions
    if kind == "linear":
        factor = scaling.number("factor", 1.0, 1e6)
        return LinearRope(theta, factor), min(MAX_POSITIONS, int(max_positions * factor))
    if kind == "llama3":
        return _llama3_rope(scaling, theta, max_positions), max_positions
    if kind == "yarn":
        yarn = _yarn_rope(scaling, theta, max_positions)
        return yarn, max(max_positions, min(MAX_POSITIONS, int(yarn.original_max_positions * yarn.factor)))
    name = "rope_type" if "rope_type" in scaling else "type"
    raise scaling.wrong(name, "must be one of default, linear, llama3 and yarn: other rope types are not supported")


def _llama3_rope(scaling: Fields, theta: float, max_positions: int) -> Llama3Rope:
    low = scaling.number("low_freq_factor", 1e-6, 1e6)
    high = scaling.number("high_freq_factor", 1e-6, 1e6)
    if high <= low:
        raise scaling.wrong("high_freq_factor", f"must be above low_freq_factor, which is {low:g}")
    return Llama3Rope(
        theta,
        factor=scaling.number("factor", 1.0, 1e6),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=scaling.integer("original_max_position_embeddings", 1, MAX_POSITIONS, max_positions),
    )


def _yarn_rope(scaling: Fields, theta: float, max_positions: int) -> YarnRope:
    if theta <= 1.0:
        raise ModelError("config.json: rope_theta must be above 1 for yarn")
    original = scaling.integer("original_max_position_embeddings", 1, MAX_POSITIONS, max_positions)
    factor = scaling.number("factor", 1.0, 1e6, max(1.0, max_positions / original))
    return YarnRope(
        theta,
        factor=factor,
        original_max_positions=original,
        beta_fast=scaling.number("beta_fast", 1e-6, 1e6, 32.0),
        beta_slow=scaling.number("beta_slow", 1e-6, 1e6, 1.0),
        attention_factor=_yarn_attention_factor(scaling, factor),
        truncate=scaling.flag("truncate", True),
    )


def _yarn_attention_factor(scaling: Fields, factor: float) -> float:
    """``attention_factor`` where it is given; else 0.1 ln(factor) + 1, as the paper has it, or the quotient that
    ``mscale`` and ``mscale_all_dim`` ask for."""
    if "attention_factor" in scaling:
        return scaling.number("attention_factor", 1e-6, 1e6)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    numerator = scaling.number("mscale", 0.0, 1e6, 0.0)
    denominator = scaling.number("mscale_all_dim", 0.0, 1e6, 0.0)
    return scale(numerator) / scale(denominator) if numerator and denominator else scale(1.0)

"""Turns the Hugging Face config of each model family into a ``ModelSpec``. A new family is a function and an entry in
``FAMILIES``. Defaults are those of transformers' config classes, which leave them out of the files they write.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from penstock.models.checkpoint.files.hf_config import HfConfigReader
from penstock.models.checkpoint.rope_config import (
    FULL,
    MAX_POSITIONS,
    SLIDING,
    RopeReader,
    read_partial_rope,
    read_rope,
    read_rope_by_layer_type,
    read_yarn_by_default,
)
from penstock.models.checkpoint.spec import Activation, ClampedGate, Experts, ModelSpec, NormPlacement, QkNorm

MAX_LAYERS = 1024
MAX_SIZE = 1 << 20
MAX_VOCAB = 1 << 24
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_EXPERTS = 4096

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}

_OLD_FULL = "attention"
"""The name of full attention in older configs."""

Windows = tuple[int | None, ...]


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Returns the decoder that a config.json describes. Raises ModelError, naming the field, also for unsupported
    models.
    """
    fields = HfConfigReader(config)
    for name in fields.texts("architectures"):
        # A base model without its head, such as an embedding model.
        architecture = f"{name.removesuffix('Model')}ForCausalLM" if name.endswith("Model") else name
        if architecture in FAMILIES:
            break
    else:
        known = ", ".join(sorted(FAMILIES))
        raise fields.wrong("architectures", f"names no supported architecture; supported are {known}")
    return FAMILIES[architecture](fields, architecture)


def _llama(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Llama 1 to 3, and models that declare themselves as Llama."""
    spec = _decoder(fields, architecture, _same_windows(fields, None), Defaults(max_positions=2048))
    return replace(_with_biases(spec, fields), mlp_bias=fields.flag("mlp_bias", False))


def _mistral(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Mistral and Ministral. Layers have the window if ``layer_types`` lists them. Without that field all have it,
    unless ``sliding_window`` is null.
    """
    window = _window(fields, 4096)
    windows = _windows_by_type(fields, window, lambda layer: window is not None)
    return _decoder(fields, architecture, windows, Defaults(max_positions=4096 * 32, kv_heads=8))


def _mixtral(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Mixtral: experts in every layer."""
    windows = _same_windows(fields, _window(fields, None))
    defaults = Defaults(
        max_positions=4096 * 32, kv_heads=8, norm_eps=1e-5, read_rope=partial(read_rope, default_theta=1e6)
    )
    spec = _decoder(fields, architecture, windows, defaults)
    experts = _experts(fields, "num_local_experts", 8, 2, spec.intermediate_size)
    return replace(spec, experts=experts)


def _qwen2(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Qwen2 and 2.5: biased queries, keys and values; windows only if ``use_sliding_window`` is set."""
    spec = _decoder(fields, architecture, _qwen_windows(fields), Defaults(max_positions=32768))
    return replace(spec, qkv_bias=True)


def _qwen3(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Qwen3: norms on queries and keys, and a head size of its own."""
    spec = _decoder(fields, architecture, _qwen_windows(fields), Defaults(max_positions=32768, head_dim=128))
    return replace(_with_biases(spec, fields), qk_norm=QkNorm.HEAD)


def _qwen3_moe(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Qwen3-MoE: every ``decoder_sparse_step``-th layer has experts, except those in ``mlp_only_layers``."""
    window = _window(fields, 4096) if fields.flag("use_sliding_window", False) else None
    windows = _same_windows(fields, window)
    spec = _decoder(fields, architecture, windows, Defaults(max_positions=32768, kv_heads=4))
    step, dense = (
        fields.integer("decoder_sparse_step", 1, MAX_LAYERS, 1),
        fields.integers("mlp_only_layers", 0, 1 << 16),
    )
    name = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    experts = replace(
        _experts(fields, name, 128, 8, fields.integer("moe_intermediate_size", 1, MAX_SIZE, 768)),
        normalise=fields.flag("norm_topk_prob", False),
        layers=tuple((layer + 1) % step == 0 and layer not in dense for layer in range(spec.num_layers)),
    )
    return replace(_with_biases(spec, fields), qk_norm=QkNorm.HEAD, experts=experts)


def _gemma2(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Gemma 2: norms around both halves of a layer, soft caps, and a window in every other layer."""
    windows = _windows_by_type(fields, _window(fields, 4096), lambda layer: layer % 2 == 0)
    spec = _decoder(fields, architecture, windows, replace(GEMMA, max_positions=8192))
    return replace(
        _with_gemmas_parts(spec, fields),
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", 30.0),
    )


def _gemma3(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Gemma 3's text model: Gemma 2 with norms on queries and keys instead of the cap on scores."""
    if "attn_logit_softcapping" in fields:
        raise fields.wrong("attn_logit_softcapping", "must be null: scores have no cap in Gemma 3")
    pattern = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, 6)
    windows = _windows_by_type(fields, _window(fields, 4096), lambda layer: (layer + 1) % pattern != 0)
    spec = _decoder(fields, architecture, windows, replace(GEMMA, read_rope=read_rope_by_layer_type))
    return replace(
        _with_gemmas_parts(spec, fields),
        qk_norm=QkNorm.HEAD,
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", None),
    )


def _olmo2(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """OLMo-2: norms only after attention and MLP, and over all queries and all keys."""
    spec = _decoder(fields, architecture, _same_windows(fields, None), Defaults(max_positions=2048, norm_eps=1e-5))
    return replace(_with_biases(spec, fields), norm_placement=NormPlacement.POST, qk_norm=QkNorm.ALL)


def _phi3(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Phi-3 through Phi-4: only part of each head is rotated."""
    windows = _same_windows(fields, _window(fields, None))
    return _decoder(
        fields, architecture, windows, Defaults(max_positions=4096, norm_eps=1e-5, read_rope=read_partial_rope)
    )


def _gpt_oss(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """gpt-oss: sinks, a window in every other layer, and biased experts with a gate of their own."""
    windows = _windows_by_type(fields, _window(fields, 128), lambda layer: layer % 2 == 0)
    defaults = Defaults(max_positions=131072, kv_heads=8, head_dim=64, norm_eps=1e-5, read_rope=read_yarn_by_default)
    spec = _decoder(fields, architecture, windows, defaults)
    gate = ClampedGate(
        alpha=fields.number("swiglu_alpha", 0.0, 1e6, 1.702), limit=fields.number("swiglu_limit", 1e-6, 1e6, 7.0)
    )
    experts = replace(_experts(fields, "num_local_experts", 128, 4, spec.intermediate_size), biased=True, gate=gate)
    return replace(_with_biases(spec, fields, default=True), sinks=True, experts=experts)


FAMILIES: dict[str, Callable[[HfConfigReader, str], ModelSpec]] = {
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "GptOssForCausalLM": _gpt_oss,
    "LlamaForCausalLM": _llama,
    "MinistralForCausalLM": _mistral,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Olmo2ForCausalLM": _olmo2,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}


@dataclass(frozen=True)
class Defaults:
    """A family's defaults for absent fields."""

    max_positions: int
    kv_heads: int | None = None
    """None: the number of query heads."""
    head_dim: int | None = None
    """None: the hidden size divided by the heads."""
    norm_eps: float = 1e-6
    activation_field: str = "hidden_act"
    activation: str = "silu"
    tied_embeddings: bool = False
    read_rope: RopeReader = read_rope


GEMMA = Defaults(
    max_positions=131072,
    kv_heads=4,
    head_dim=256,
    activation_field="hidden_activation",
    activation="gelu_pytorch_tanh",
    tied_embeddings=True,
)


def _decoder(fields: HfConfigReader, architecture: str, windows: Windows, defaults: Defaults) -> ModelSpec:
    """Reads the fields that all families share. Features that only some families have are off."""
    hidden_size = fields.integer("hidden_size", 1, MAX_SIZE)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, min(defaults.kv_heads or num_heads, num_heads))
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"must divide num_attention_heads, which is {num_heads}")
    head_dim = _head_dim(fields, hidden_size, num_heads, defaults)
    activation = fields.text(defaults.activation_field, defaults.activation)
    if activation not in ACTIVATIONS:
        raise fields.wrong(defaults.activation_field, f"must be one of {', '.join(ACTIVATIONS)}")
    max_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS, defaults.max_positions)
    rope = defaults.read_rope(fields, head_dim, max_positions)
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_SIZE),
        num_layers=len(windows),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=rope.max_positions,
        norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, defaults.norm_eps),
        norm_offset=0.0,
        norm_placement=NormPlacement.PRE,
        qk_norm=QkNorm.NONE,
        activation=ACTIVATIONS[activation],
        ropes=tuple(rope.full if window is None else rope.windowed for window in windows),
        rotary_dim=rope.rotary_dim,
        windows=windows,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        attention_scale=head_dim**-0.5,
        attention_soft_cap=None,
        sinks=False,
        embedding_scale=1.0,
        logit_soft_cap=None,
        experts=None,
        tied_embeddings=fields.flag("tie_word_embeddings", defaults.tied_embeddings),
    )


def _head_dim(fields: HfConfigReader, hidden_size: int, num_heads: int, defaults: Defaults) -> int:
    head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, defaults.head_dim or max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise fields.wrong("head_dim", f"must be even for rotary embedding, and comes to {head_dim}")
    if "head_dim" not in fields and defaults.head_dim is None and hidden_size % num_heads:
        raise fields.wrong("hidden_size", f"must be a multiple of num_attention_heads, which is {num_heads}")
    return head_dim


def _with_biases(spec: ModelSpec, fields: HfConfigReader, default: bool = False) -> ModelSpec:
    """Applies ``attention_bias``, which covers the output projection too."""
    biased = fields.flag("attention_bias", default)
    return replace(spec, qkv_bias=biased, output_bias=biased)


def _with_gemmas_parts(spec: ModelSpec, fields: HfConfigReader) -> ModelSpec:
    """Applies what Gemma 2 and 3 share."""
    if fields.flag("use_bidirectional_attention", False):
        raise fields.wrong("use_bidirectional_attention", "is not supported: only causal models generate text")
    return replace(
        _with_biases(spec, fields),
        norm_offset=1.0,
        norm_placement=NormPlacement.BOTH,
        attention_scale=fields.number("query_pre_attn_scalar", 1e-6, 1e6, 256.0) ** -0.5,
        embedding_scale=math.sqrt(spec.hidden_size),
    )


def _experts(
    fields: HfConfigReader, name: str, default: int, default_per_token: int, intermediate_size: int
) -> Experts:
    """Experts in every layer. ``name`` is the field that holds their number."""
    num_experts = fields.integer(name, 1, MAX_EXPERTS, default)
    return Experts(
        num_experts=num_experts,
        per_token=fields.integer("num_experts_per_tok", 1, num_experts, default_per_token),
        intermediate_size=intermediate_size,
        normalise=True,
        biased=False,
        gate=None,
        layers=(True,) * _num_layers(fields),
    )


def _soft_cap(fields: HfConfigReader, name: str, default: float | None) -> float | None:
    """The value of the field, or None if it is null."""
    if fields.is_null(name) or (name not in fields and default is None):
        return None
    return fields.number(name, 1e-3, 1e6, default)


def _num_layers(fields: HfConfigReader) -> int:
    return fields.integer("num_hidden_layers", 1, MAX_LAYERS)


def _same_windows(fields: HfConfigReader, window: int | None) -> Windows:
    """Returns the same window for all layers. ``layer_types`` must be valid, but has no effect, as in transformers'
    classes for these families (see ``ignored_layer_types``).
    """
    _layer_types(fields)
    return (window,) * _num_layers(fields)


def _window(fields: HfConfigReader, default: int | None) -> int | None:
    """The value of ``sliding_window``, or None if it is null."""
    if fields.is_null("sliding_window") or ("sliding_window" not in fields and default is None):
        return None
    return fields.integer("sliding_window", 1, MAX_POSITIONS, default)


def _qwen_windows(fields: HfConfigReader) -> Windows:
    """Without ``layer_types``, the layers from ``max_window_layers`` on have the window."""
    window = _window(fields, 4096) if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 0, MAX_POSITIONS, 28)
    return _windows_by_type(fields, window, lambda layer: window is not None and layer >= first)


def _windows_by_type(fields: HfConfigReader, window: int | None, default: Callable[[int], bool]) -> Windows:
    """Uses ``layer_types`` if the config has it, else ``default``, which returns whether a layer has the window."""
    kinds = _layer_types(fields) or [SLIDING if default(layer) else FULL for layer in range(_num_layers(fields))]
    if window is None and SLIDING in kinds:
        raise fields.wrong("layer_types", f"needs sliding_window (and use_sliding_window) for its {SLIDING} layers")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _layer_types(fields: HfConfigReader) -> list[str] | None:
    """The kind of attention of each layer in ``layer_types``; None if the field is absent."""
    if "layer_types" not in fields:
        return None
    num_layers = _num_layers(fields)
    kinds = [FULL if kind == _OLD_FULL else kind for kind in fields.texts("layer_types")]
    if len(kinds) != num_layers:
        raise fields.wrong("layer_types", f"must have num_hidden_layers entries, {num_layers}; it has {len(kinds)}")
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise fields.wrong("layer_types", f"must name only {FULL} and {SLIDING}; {min(unknown)} is not supported")
    return kinds


def ignored_layer_types(config: Mapping[str, Any], spec: ModelSpec) -> str | None:
    """A warning if ``layer_types`` contradicts what the family computes, which then ignores it; else None."""
    kinds = _layer_types(HfConfigReader(config))
    if kinds is None or kinds == [FULL if window is None else SLIDING for window in spec.windows]:
        return None
    computed = "full attention" if spec.windows[0] is None else f"a window of {spec.windows[0]}"
    return (
        f"layer_types is ignored: every layer of a {spec.architecture} has {computed} here and in transformers; "
        "remove the field, or correct architectures"
    )

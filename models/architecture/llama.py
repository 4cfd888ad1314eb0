"""Families around Llama, with RMS norms and a gated MLP."""

from dataclasses import replace
from functools import partial

from penstock.models.architecture.decoder import (
    MAX_LAYERS,
    MAX_SIZE,
    Defaults,
    Family,
    Windows,
    num_layers,
    read_decoder,
    read_layer_types,
    read_window,
    rotated_layers,
    same_windows,
    windows_by_type,
    with_biases,
)
from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.recurrent import ShortConvolution, falcons_factors, read_falcons_mamba2
from penstock.models.architecture.rope_config import (
    FULL,
    MAX_POSITIONS,
    SLIDING,
    read_partial_rope,
    read_query_scaling,
    read_rope,
    read_rope_by_layer_type,
    with_default_scaling,
)
from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import NormPlacement, NoRope, QkNorm

_CONVOLUTION = "conv"
"""The name of layers with a short convolution in ``layer_types``."""


def llama(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Llama 1 to 3, and models that declare themselves as Llama."""
    spec = read_decoder(fields, architecture, same_windows(fields, None), Defaults(max_positions=2048))
    return replace(with_biases(spec, fields), mlp_bias=fields.flag("mlp_bias", False))


def mllama(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Llama 3.2 Vision for text: Llama 3 without the layers that attend to images, which text skips. Its embedding and
    its head are always two matrices."""
    count = num_layers(fields)
    crossing = [3, 8, 13, 18, 23, 28, 33, 38]
    if "cross_attention_layers" in fields:
        crossing = fields.integers("cross_attention_layers", 0, MAX_LAYERS)
    left_out = tuple(sorted({layer for layer in crossing if layer < count}))
    if len(left_out) == count:
        raise fields.wrong("cross_attention_layers", "must leave a layer that attends to text")
    defaults = Defaults(
        max_positions=131072, kv_heads=8, norm_eps=1e-5, read_rope=partial(read_rope, default_theta=5e5)
    )
    spec = read_decoder(fields, architecture, (None,) * (count - len(left_out)), defaults)
    return replace(spec, left_out_layers=left_out, tied_embeddings=False)


def exaone(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """EXAONE 3 and 3.5: Llama with other names."""
    fields = fields.with_aliases(
        num_hidden_layers="num_layers", hidden_act="activation_function", rms_norm_eps="layer_norm_epsilon"
    )
    return read_decoder(fields, architecture, same_windows(fields, None), Defaults(max_positions=2048, norm_eps=1e-5))


def internlm2(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """InternLM 2 and 2.5: Llama with other names, and one matrix for queries, keys and values."""
    defaults = Defaults(max_positions=2048)
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    biased = fields.flag("bias", False)
    return replace(spec, qkv_bias=biased, output_bias=biased)


def arcee(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Arcee: Llama with squared ReLUs and no gate."""
    defaults = Defaults(max_positions=4096, norm_eps=1e-5, activation="relu2", gated_mlp=False)
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    return replace(with_biases(spec, fields), mlp_bias=fields.flag("mlp_bias", False))


def cwm(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """CWM: Llama with windows in three of four layers."""
    fields = with_default_scaling(
        fields,
        rope_type="llama3",
        rope_theta=1e6,
        factor=16.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    windows = windows_by_type(fields, read_window(fields, 8192), lambda layer: layer % 4 != 0)
    defaults = Defaults(
        max_positions=131072,
        kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        read_rope=partial(read_rope, default_theta=1e6),
    )
    return replace(read_decoder(fields, architecture, windows, defaults), mlp_bias=fields.flag("mlp_bias", False))


def internlm3(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """InternLM 3: Llama with other names of its biases."""
    spec = read_decoder(fields, architecture, same_windows(fields, None), Defaults(max_positions=32768))
    biased = fields.flag("bias", False)
    return replace(spec, qkv_bias=fields.flag("qkv_bias", False), output_bias=biased, mlp_bias=biased)


def seed_oss(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Seed-OSS: Llama with a bias of its own for the output projection."""
    defaults = Defaults(max_positions=524288, kv_heads=8, head_dim=128)
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    return replace(
        spec,
        qkv_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def ernie(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """ERNIE 4.5: Llama that rotates neighbouring dimensions."""
    defaults = Defaults(
        max_positions=131072,
        kv_heads=2,
        head_dim=128,
        norm_eps=1e-5,
        tied_embeddings=True,
        read_rope=partial(read_rope, default_theta=5e5),
    )
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    biased = fields.flag("use_bias", False)
    return replace(spec, qkv_bias=biased, output_bias=biased, mlp_bias=biased, interleaved_rope=True)


def granite(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Granite: Llama with factors of embeddings, scores, logits and of what each layer adds."""
    spec = read_decoder(fields, architecture, same_windows(fields, None), Defaults(max_positions=2048))
    spec = replace(with_biases(spec, fields), mlp_bias=fields.flag("mlp_bias", False))
    return with_granites_factors(spec, fields)


def with_granites_factors(spec: ModelSpec, fields: HfConfigReader) -> ModelSpec:
    """Applies the four factors.

    x += r f(norm(x)) becomes y += f(norm(y)) with y = x / r: norms give the same for x and for y if their eps is
    divided by r^2.
    """

    def factor(name: str) -> float:
        return fields.number(name, 1e-6, 1e6, 1.0)

    residual = factor("residual_multiplier")
    return replace(
        spec,
        embedding_scale=factor("embedding_multiplier") / residual,
        norm_eps=spec.norm_eps / residual**2,
        attention_scale=factor("attention_multiplier"),
        logit_scale=1.0 / factor("logits_scaling"),
    )


def mistral(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Mistral and Ministral. Layers have the window if ``layer_types`` lists them. Without that field all have it,
    unless ``sliding_window`` is null.
    """
    window = read_window(fields, 4096)
    windows = windows_by_type(fields, window, lambda layer: window is not None)
    return read_decoder(fields, architecture, windows, Defaults(max_positions=4096 * 32, kv_heads=8))


def ministral3(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Ministral 3 and Devstral 2: Mistral with Llama 4's scaling of queries."""
    fields = with_default_scaling(
        fields,
        rope_type="yarn",
        rope_theta=1e6,
        factor=16.0,
        original_max_position_embeddings=16384,
        mscale=1.0,
        mscale_all_dim=1.0,
        llama_4_scaling_beta=0.1,
    )
    defaults = Defaults(
        max_positions=262144,
        kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        read_rope=partial(read_rope, default_theta=1e6),
    )
    spec = read_decoder(fields, architecture, same_windows(fields, read_window(fields, None)), defaults)
    return replace(spec, query_scaling=read_query_scaling(fields))


def qwen2(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Qwen2 and 2.5: biased queries, keys and values; windows only if ``use_sliding_window`` is set."""
    spec = read_decoder(fields, architecture, _qwen_windows(fields), Defaults(max_positions=32768))
    return replace(spec, qkv_bias=True)


def qwen3(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Qwen3: norms on queries and keys, and a head size of its own."""
    spec = read_decoder(fields, architecture, _qwen_windows(fields), Defaults(max_positions=32768, head_dim=128))
    return replace(with_biases(spec, fields), qk_norm=QkNorm.HEAD)


def hunyuan(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Hunyuan's dense models: Qwen3 with the norms on queries and keys after their rotation."""
    defaults = Defaults(max_positions=2048, norm_eps=1e-5)
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    return replace(with_biases(spec, fields), qk_norm=QkNorm.HEAD, qk_norm_is_last=True)


def smollm3(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """SmolLM3: Llama in which every fourth layer rotates nothing."""
    rotated = rotated_layers(fields)
    window = read_window(fields, None) if fields.flag("use_sliding_window", False) else None
    types = read_layer_types(fields)
    sliding = [not each for each in rotated] if types is None else [kind == SLIDING for kind in types]
    windows = tuple(window if slides else None for slides in sliding)
    defaults = Defaults(
        max_positions=32768, kv_heads=4, tied_embeddings=True, read_rope=partial(read_rope, default_theta=2e6)
    )
    spec = read_decoder(fields, architecture, windows, defaults)
    ropes = tuple(rope if turns else NoRope() for rope, turns in zip(spec.ropes, rotated, strict=True))
    return replace(with_biases(spec, fields), mlp_bias=fields.flag("mlp_bias", False), ropes=ropes)


def exaone4(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """EXAONE 4: norms after attention and MLP; of a model with windows, layers without one rotate nothing."""
    window = read_window(fields, 4096)
    pattern = "LLLG"
    if fields.is_text("sliding_window_pattern"):
        pattern = fields.text("sliding_window_pattern")
    elif window is not None:
        pattern = "L" * (fields.integer("sliding_window_pattern", 1, MAX_LAYERS, 4) - 1) + "G"
    if not pattern or not set(pattern) <= {"L", "G"}:
        raise fields.wrong("sliding_window_pattern", "must be a number, or consist of L and G")
    windows = windows_by_type(fields, window, lambda layer: window is not None and pattern[layer % len(pattern)] == "L")
    spec = read_decoder(fields, architecture, windows, Defaults(max_positions=2048, norm_eps=1e-5))
    unrotated = tuple(NoRope() if w is None else rope for rope, w in zip(spec.ropes, windows, strict=True))
    return replace(
        spec,
        norm_placement=NormPlacement.POST,
        qk_norm=QkNorm.HEAD,
        ropes=spec.ropes if window is None else unrotated,
    )


def olmo2(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """OLMo 2: norms only after attention and MLP, and over all queries and all keys."""
    spec = read_decoder(fields, architecture, same_windows(fields, None), Defaults(max_positions=2048, norm_eps=1e-5))
    return replace(with_biases(spec, fields), norm_placement=NormPlacement.POST, qk_norm=QkNorm.ALL)


def olmo3(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """OLMo 3: OLMo 2 with windows in three of four layers, which are rotated without scaling."""
    windows = windows_by_type(fields, read_window(fields, 4096), lambda layer: (layer + 1) % 4 != 0)
    read = partial(read_rope_by_layer_type, default_theta=5e5, local_theta="rope_theta", default_local_theta=5e5)
    spec = read_decoder(fields, architecture, windows, Defaults(max_positions=2048, norm_eps=1e-5, read_rope=read))
    return replace(with_biases(spec, fields), norm_placement=NormPlacement.POST, qk_norm=QkNorm.ALL)


def phi3(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Phi-3 through Phi-4: only part of each head is rotated."""
    windows = same_windows(fields, read_window(fields, None))
    return read_decoder(
        fields, architecture, windows, Defaults(max_positions=4096, norm_eps=1e-5, read_rope=read_partial_rope)
    )


def glm(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """GLM-4-9B: neighbouring dimensions of half of each head are rotated."""
    defaults = Defaults(
        max_positions=131072,
        kv_heads=2,
        head_dim=128,
        norm_eps=1.5625e-7,
        read_rope=partial(read_rope, default_part=0.5),
    )
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    return replace(spec, qkv_bias=fields.flag("attention_bias", True), interleaved_rope=True)


def glm4(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """GLM-4-0414: GLM-4-9B with norms around both halves of a layer."""
    return replace(glm(fields, architecture), norm_placement=NormPlacement.BOTH)


def lfm2(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """LFM2: Llama with norms on queries and keys, and with short convolutions in place of attention in most layers."""
    inner = fields.integer("block_ff_dim" if "block_ff_dim" in fields else "intermediate_size", 1, MAX_SIZE, 12288)
    if fields.flag("block_auto_adjust_ff_dim", True):
        inner = 2 * inner // 3
        if not fields.is_null("block_ffn_dim_multiplier"):
            inner = int(fields.number("block_ffn_dim_multiplier", 0.0, 64.0, 1.0) * inner)
            unit = fields.integer("block_multiple_of", 1, MAX_SIZE, 256)
            inner = -(-inner // unit) * unit
    if not 1 <= inner <= MAX_SIZE:
        raise fields.wrong("block_ffn_dim_multiplier", f"must make an intermediate size from 1 to {MAX_SIZE}")
    return replace(lfm2_decoder(fields, architecture, default_inner=12288), intermediate_size=inner)


def lfm2_decoder(fields: HfConfigReader, architecture: str, default_inner: int) -> ModelSpec:
    """Reads what LFM2 and its MoE models share."""
    kinds = read_layer_types(fields, _CONVOLUTION)
    count = num_layers(fields)
    if kinds is None:
        full = fields.integers("full_attn_idxs", 0, MAX_LAYERS) if "full_attn_idxs" in fields else range(count)
        kinds = [FULL if layer in full else _CONVOLUTION for layer in range(count)]
    if FULL not in kinds:
        raise fields.wrong("layer_types", f"must leave a layer with {FULL}")
    defaults = Defaults(
        max_positions=128000,
        kv_heads=8,
        inner=default_inner,
        norm_eps=1e-5,
        norm_eps_field="norm_eps",
        tied_embeddings=True,
        read_rope=partial(read_rope, default_theta=1e6),
    )
    spec = read_decoder(fields, architecture, (None,) * count, defaults)
    taps, biased = fields.integer("conv_L_cache", 2, 64, 3), fields.flag("conv_bias", False)
    convolution = ShortConvolution(spec.hidden_size, taps, biased)
    return replace(
        spec,
        qk_norm=QkNorm.HEAD,
        recurrent=tuple(None if kind == FULL else convolution for kind in kinds),
        tied_embeddings=fields.flag("tie_embedding", spec.tied_embeddings),
    )


def falcon_h1(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Falcon-H1: Llama with Mamba-2 beside attention in every layer, and with factors of what linears compute."""
    count = num_layers(fields)
    spec = read_decoder(fields, architecture, (None,) * count, Defaults(max_positions=8192, kv_heads=8, norm_eps=1e-5))
    mamba = read_falcons_mamba2(fields, spec.hidden_size, spec.norm_eps)
    return replace(
        with_biases(spec, fields),
        mlp_bias=fields.flag("mlp_bias", False),
        recurrent=(mamba,) * count,
        attends_beside_recurrent=True,
        attention_scale=spec.attention_scale * fields.number("key_multiplier", 1e-6, 1e6, 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1e-6, 1e6, 1.0),
        logit_scale=fields.number("lm_head_multiplier", 1e-6, 1e6, 1.0),
        factors=tuple(falcons_factors(fields, mamba)),
    )


def _qwen_windows(fields: HfConfigReader) -> Windows:
    """Without ``layer_types``, the layers from ``max_window_layers`` on have the window."""
    window = read_window(fields, 4096) if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 0, MAX_POSITIONS, 28)
    return windows_by_type(fields, window, lambda layer: window is not None and layer >= first)


FAMILIES: dict[str, Family] = {
    "ArceeForCausalLM": arcee,
    "CwmForCausalLM": cwm,
    "Ernie4_5ForCausalLM": ernie,
    "Exaone4ForCausalLM": exaone4,
    "ExaoneForCausalLM": exaone,
    "Glm4ForCausalLM": glm4,
    "FalconH1ForCausalLM": falcon_h1,
    "GlmForCausalLM": glm,
    "GraniteForCausalLM": granite,
    "HunYuanDenseV1ForCausalLM": hunyuan,
    "InternLM2ForCausalLM": internlm2,
    "InternLM3ForCausalLM": internlm3,
    "Lfm2ForCausalLM": lfm2,
    "LlamaForCausalLM": llama,
    "Ministral3ForCausalLM": ministral3,
    "MinistralForCausalLM": mistral,
    "MistralForCausalLM": mistral,
    "MllamaForCausalLM": mllama,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "SeedOssForCausalLM": seed_oss,
    "SmolLM3ForCausalLM": smollm3,
}
"""The families of this file. ``registry`` collects those of all files."""

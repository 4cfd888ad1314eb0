"""Families with layer norms: most of them compute attention and MLP side by side, or have an MLP without a gate."""

from dataclasses import replace
from functools import partial

from penstock.models.architecture.decoder import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_SIZE,
    Defaults,
    Family,
    read_decoder,
    read_window,
    same_windows,
    windows_by_type,
    with_biases,
    with_layer_norms,
)
from penstock.models.architecture.experts import read_grouped_experts
from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.recurrent import read_nemotrons_mamba2
from penstock.models.architecture.rope_config import read_rope
from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import Experts, NormPlacement, NoRope, PositionTable, QkNorm

LAYER_NORM = Defaults(max_positions=2048, norm_eps=1e-5, norm_eps_field="layer_norm_eps")
PLAIN = replace(LAYER_NORM, gated_mlp=False)


def olmo(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """OLMo 1: Llama with layer norms that have no weights."""
    if "clip_qkv" in fields:
        raise fields.wrong("clip_qkv", "must be null: clipped queries, keys and values are not supported")
    spec = read_decoder(fields, architecture, same_windows(fields, None), LAYER_NORM)
    return replace(with_layer_norms(with_biases(spec, fields)), norm_eps=1e-5)


def cohere(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Command-R and R+: neighbouring dimensions are rotated, and logits have a factor."""
    defaults = replace(
        LAYER_NORM, max_positions=8192, tied_embeddings=True, read_rope=partial(read_rope, default_theta=5e5)
    )
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    qk_norm = QkNorm.EACH_HEAD if fields.flag("use_qk_norm", False) else QkNorm.NONE
    return replace(_with_coheres_parts(spec, fields), qk_norm=qk_norm)


def cohere2(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Command-R7B and A: Command-R with windows in three of four layers; the others rotate nothing."""
    windows = windows_by_type(fields, read_window(fields, 4096), lambda layer: (layer + 1) % 4 != 0)
    defaults = replace(LAYER_NORM, max_positions=8192, tied_embeddings=True)
    spec = read_decoder(fields, architecture, windows, defaults)
    ropes = tuple(NoRope() if window is None else rope for rope, window in zip(spec.ropes, windows, strict=True))
    return replace(_with_coheres_parts(spec, fields), ropes=ropes)


def _with_coheres_parts(spec: ModelSpec, fields: HfConfigReader) -> ModelSpec:
    return replace(
        with_layer_norms(with_biases(spec, fields), "weight"),
        norm_placement=NormPlacement.PARALLEL,
        interleaved_rope=True,
        logit_scale=fields.number("logit_scale", 1e-6, 1e6, 0.0625),
    )


def starcoder2(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """StarCoder2: biased linears, and no gate."""
    defaults = Defaults(
        max_positions=4096,
        kv_heads=2,
        norm_eps=1e-5,
        norm_eps_field="norm_epsilon",
        activation="gelu_pytorch_tanh",
        gated_mlp=False,
        tied_embeddings=True,
    )
    spec = read_decoder(fields, architecture, same_windows(fields, read_window(fields, None)), defaults)
    return _with_norms_and_biases(spec, biased=fields.flag("use_bias", True))


def stablelm(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """StableLM: a quarter of each head is rotated."""
    if fields.flag("qk_layernorm", False):
        raise fields.wrong("qk_layernorm", "must be false: norms of queries and keys are not supported in this family")
    defaults = replace(LAYER_NORM, max_positions=4096, read_rope=partial(read_rope, default_part=0.25))
    spec = with_layer_norms(read_decoder(fields, architecture, same_windows(fields, None), defaults), "weight", "bias")
    is_parallel = fields.flag("use_parallel_residual", False)
    return replace(
        spec,
        qkv_bias=fields.flag("use_qkv_bias", False),
        norm_placement=NormPlacement.PARALLEL if is_parallel else NormPlacement.PRE,
    )


def phi(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Phi-1, 1.5 and 2: half of each head is rotated, and everything has a bias, the head too."""
    if fields.flag("qk_layernorm", False):
        raise fields.wrong("qk_layernorm", "must be false: norms of queries and keys are not supported in this family")
    defaults = replace(PLAIN, activation="gelu_new", read_rope=partial(read_rope, default_part=0.5))
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    return replace(_with_norms_and_biases(spec, biased=True), norm_placement=NormPlacement.PARALLEL, head_bias=True)


def gpt_neox(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """GPT-NeoX and Pythia: a quarter of each head is rotated; attention and MLP each have a norm of the same input."""
    # As many key heads as query heads, whatever the config has.
    fields = fields.with_aliases(
        rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct", num_key_value_heads="num_attention_heads"
    )
    defaults = replace(PLAIN, activation="gelu", read_rope=partial(read_rope, default_part=0.25))
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    spec = _with_norms_and_biases(spec, biased=True)
    biased = fields.flag("attention_bias", True)
    is_parallel = fields.flag("use_parallel_residual", True)
    return replace(
        spec,
        qkv_bias=biased,
        output_bias=biased,
        norm_placement=NormPlacement.PARALLEL_NORMS if is_parallel else NormPlacement.PRE,
    )


def falcon(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Falcon 7B and 40B: attention and MLP side by side, with one norm or two, and few key heads."""
    if fields.flag("alibi", False):
        raise fields.wrong("alibi", "must be false: only rotary embedding is supported")
    is_new = fields.flag("new_decoder_architecture", False)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    inner = 4 * fields.integer("hidden_size", 1, MAX_SIZE)
    kv_heads = 1 if not is_new and fields.flag("multi_query", True) else num_heads
    fields = fields.with_aliases(
        layer_norm_eps="layer_norm_epsilon",
        hidden_act="activation",
        intermediate_size="ffn_hidden_size",
        num_key_value_heads="num_kv_heads" if is_new else "",
    )
    defaults = replace(PLAIN, kv_heads=kv_heads, activation="gelu", tied_embeddings=True, inner=inner)
    spec = _with_norms_and_biases(
        read_decoder(fields, architecture, same_windows(fields, None), defaults), fields.flag("bias", False)
    )
    placement = NormPlacement.PARALLEL if fields.flag("parallel_attn", True) else NormPlacement.PRE
    if is_new and fields.integer("num_ln_in_parallel_attn", 1, 2, 2) == 2:
        placement = NormPlacement.PARALLEL_NORMS
    return replace(spec, norm_placement=placement)


def gpt2(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """GPT-2: positions are embedded, not rotated."""
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if fields.flag(name, False):
            raise fields.wrong(name, "must be false: only GPT-2's own attention is supported")
    fields = fields.with_aliases(
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        num_key_value_heads="n_head",
        intermediate_size="n_inner",
        max_position_embeddings="n_positions",
        layer_norm_eps="layer_norm_epsilon",
        hidden_act="activation_function",
    )
    inner = 4 * fields.integer("hidden_size", 1, MAX_SIZE)
    defaults = replace(PLAIN, max_positions=1024, activation="gelu_new", tied_embeddings=True, inner=inner)
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    spec = _with_position_table(_with_norms_and_biases(spec, biased=True), offset=0)
    return spec if fields.flag("scale_attn_weights", True) else replace(spec, attention_scale=1.0)


def opt(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """OPT: GPT-2 with ReLUs, whose first two rows of the table of positions are not used."""
    for name in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        if not fields.flag(name, True):
            raise fields.wrong(name, "must be true: other variants of OPT are not supported")
    hidden_size = fields.integer("hidden_size", 1, MAX_SIZE)
    fields.integer("word_embed_proj_dim", hidden_size, hidden_size, hidden_size)
    fields = fields.with_aliases(
        intermediate_size="ffn_dim", hidden_act="activation_function", num_key_value_heads="num_attention_heads"
    )
    defaults = replace(PLAIN, activation="relu", tied_embeddings=True)
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    return replace(_with_position_table(_with_norms_and_biases(spec, biased=True), offset=2), norm_eps=1e-5)


def _with_position_table(spec: ModelSpec, offset: int) -> ModelSpec:
    return replace(
        spec,
        ropes=(NoRope(),) * spec.num_layers,
        position_table=PositionTable(spec.max_positions + offset, offset),
    )


def nemotron(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Minitron and Nemotron-4: norms add one to their weights; squared ReLUs without a gate."""
    defaults = Defaults(
        max_positions=4096,
        norm_eps=1e-5,
        norm_eps_field="norm_eps",
        activation="relu2",
        gated_mlp=False,
        read_rope=partial(read_rope, default_part=0.5),
    )
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    spec = with_biases(with_layer_norms(spec, "weight", "bias"), fields)
    return replace(spec, norm_offset=1.0, mlp_bias=fields.flag("mlp_bias", False))


def nemotron_h(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Nemotron-H and Nemotron 3: RMS norms, and layers that are Mamba-2, attention that rotates nothing, a squared ReLU
    MLP, or experts of this kind."""
    kinds = _blocks(fields)
    defaults = Defaults(
        max_positions=4096,
        kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        norm_eps_field="layer_norm_epsilon",
        activation_field="mlp_hidden_act",
        activation="relu2",
        gated_mlp=False,
    )
    spec = read_decoder(fields, architecture, (None,) * len(kinds), defaults)
    mamba = read_nemotrons_mamba2(fields, spec.norm_eps)
    return replace(
        spec,
        mlp_bias=fields.flag("mlp_bias", False),
        ropes=(NoRope(),) * len(kinds),
        recurrent=tuple(mamba if kind == "mamba" else None for kind in kinds),
        mlp_only=tuple(kind in ("mlp", _EXPERTS) for kind in kinds),
        experts=_nemotrons_experts(fields, kinds) if _EXPERTS in kinds else None,
    )


def _nemotrons_experts(fields: HfConfigReader, kinds: list[str]) -> Experts:
    if "moe_latent_size" in fields and not fields.is_null("moe_latent_size"):
        raise fields.wrong("moe_latent_size", "must be null: experts on a smaller input are not supported")
    if fields.flag("mlp_bias", False):
        raise fields.wrong("mlp_bias", "must be false in a model with experts")
    counts = fields.with_values(num_hidden_layers=len(kinds), n_shared_experts=1)
    experts = read_grouped_experts(counts, num_experts=8, per_token=2, first=0, shared=1, normalise=True, inner=7688)
    shared = fields.integer("moe_shared_expert_intermediate_size", 1, MAX_SIZE, 7688)
    return replace(experts, layers=tuple(kind == _EXPERTS for kind in kinds), shared_size=shared)


def _blocks(fields: HfConfigReader) -> list[str]:
    """Returns what each layer is: mamba, attention, mlp or moe."""
    name = next((name for name in ("layers_block_type", "layer_types") if name in fields), "hybrid_override_pattern")
    if name == "hybrid_override_pattern":
        kinds = [_NEMOTRONS_BLOCKS.get(letter, letter) for letter in fields.text(name)]
    else:
        kinds = [_NEMOTRONS_BLOCKS.get(kind, kind) for kind in fields.texts(name)]
    if not 1 <= len(kinds) <= MAX_LAYERS or not {"attention"} <= set(kinds) <= {*_NEMOTRONS_BLOCKS.values()}:
        raise fields.wrong(name, "must have only Mamba-2, attention, MLPs and experts, and some attention")
    return kinds


def _with_norms_and_biases(spec: ModelSpec, biased: bool) -> ModelSpec:
    """Applies layer norms, and biases of all linears if ``biased`` is set."""
    spec = with_layer_norms(spec, "weight", "bias")
    return replace(spec, qkv_bias=biased, output_bias=biased, mlp_bias=biased)


_EXPERTS = "moe"
_NEMOTRONS_BLOCKS = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": _EXPERTS,
    "linear_attention": "mamba",
    "full_attention": "attention",
}
"""Other names of layers of Nemotron-H."""

FAMILIES: dict[str, Family] = {
    "Cohere2ForCausalLM": cohere2,
    "CohereForCausalLM": cohere,
    "FalconForCausalLM": falcon,
    "GPT2LMHeadModel": gpt2,
    "GPTNeoXForCausalLM": gpt_neox,
    "NemotronForCausalLM": nemotron,
    "NemotronHForCausalLM": nemotron_h,
    "OPTForCausalLM": opt,
    "OlmoForCausalLM": olmo,
    "PhiForCausalLM": phi,
    "StableLmForCausalLM": stablelm,
    "Starcoder2ForCausalLM": starcoder2,
}
"""The families of this file. ``registry`` collects those of all files."""

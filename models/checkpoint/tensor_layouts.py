"""The names and layouts of tensors in checkpoints, by architecture, where they are not those of Llama."""

import math
from collections.abc import Sequence

import numpy as np

from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import Experts
from penstock.models.checkpoint.combined_tensors import CombinedTensor, Naming, TensorPart, Wholes
from penstock.models.checkpoint.expert_layouts import fused_experts, granite_moe, stacked
from penstock.models.checkpoint.hybrid_layouts import HYBRIDS
from penstock.models.checkpoint.quantization.scheme import MX_GROUP

WRAPPED = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.layers.", "model.layers."),
    ("model.embed_tokens.", "model.embed_tokens."),
    ("model.norm.", "model.norm."),
    ("lm_head.", "lm_head."),
)
"""The prefixes of a language model's tensors in checkpoints that also contain a vision tower, and those without it."""


def _phi3(spec: ModelSpec) -> Wholes:
    """One matrix for queries, keys and values; one for gate and up."""
    qkv = {"q_proj": spec.query_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
    inner = spec.intermediate_size
    return {
        "self_attn.qkv_proj.weight": stacked(
            spec.hidden_size, {f"self_attn.{name}.weight": rows for name, rows in qkv.items()}
        ),
        "mlp.gate_up_proj.weight": stacked(
            spec.hidden_size, {"mlp.gate_proj.weight": inner, "mlp.up_proj.weight": inner}
        ),
    }


def _llama4(spec: ModelSpec) -> Wholes:
    """``fused_experts`` under another name, with the last two dimensions exchanged."""
    return {
        name.replace("mlp.", "feed_forward."): whole.turned
        for name, whole in fused_experts(spec).items()
        if whole.turned is not None
    }


def _gpt_oss(spec: ModelSpec) -> Wholes:
    """gpt-oss's layout: experts' matrices are (in, out), and the columns of gate and up alternate. In MXFP4 they are
    (out, in), and their rows alternate.
    """
    experts = _experts(spec)
    num, inner, hidden = experts.num_experts, experts.intermediate_size, spec.hidden_size
    gate_up, gate_up_bias, down, down_bias = [], [], [], []
    for expert in range(num):
        prefix = f"mlp.experts.{expert}."
        for half, name in enumerate(("gate_proj", "up_proj")):
            first = expert * hidden * 2 * inner + half
            gate_up.append(TensorPart(f"{prefix}{name}.weight", first, (inner, hidden), (2, 2 * inner)))
            gate_up_bias.append(TensorPart(f"{prefix}{name}.bias", expert * 2 * inner + half, (inner,), (2,)))
        down.append(TensorPart(f"{prefix}down_proj.weight", expert * inner * hidden, (hidden, inner), (1, hidden)))
        down_bias.append(TensorPart(f"{prefix}down_proj.bias", expert * hidden, (hidden,)))
    return {
        "mlp.experts.gate_up_proj": CombinedTensor((num, hidden, 2 * inner), tuple(gate_up)),
        "mlp.experts.gate_up_proj_bias": CombinedTensor((num, 2 * inner), tuple(gate_up_bias)),
        "mlp.experts.down_proj": CombinedTensor((num, inner, hidden), tuple(down)),
        "mlp.experts.down_proj_bias": CombinedTensor((num, hidden), tuple(down_bias)),
        **_mxfp4_experts(num, "gate_up_proj", ("gate_proj", "up_proj"), inner, hidden),
        **_mxfp4_experts(num, "down_proj", ("down_proj",), hidden, inner),
    }


def _mxfp4_experts(num: int, whole: str, linears: Sequence[str], rows: int, columns: int) -> Wholes:
    """Four-bit codes (experts, rows, groups, 16) and scales (experts, rows, groups). Rows of the linears alternate."""
    groups, turns = -(-columns // MX_GROUP), len(linears)
    found = {}
    for kind, inner in (("blocks", (groups, MX_GROUP // 2)), ("scales", (groups,))):
        size = math.prod(inner)
        strides = (turns * size, *((MX_GROUP // 2, 1) if kind == "blocks" else (1,)))
        parts = [
            TensorPart(
                f"mlp.experts.{expert}.{name}.{kind}", (expert * rows * turns + turn) * size, (rows, *inner), strides
            )
            for expert in range(num)
            for turn, name in enumerate(linears)
        ]
        found[f"mlp.experts.{whole}_{kind}"] = CombinedTensor((num, turns * rows, *inner), tuple(parts))
    return found


def _experts(spec: ModelSpec) -> Experts:
    assert spec.experts is not None, spec.architecture
    return spec.experts


def _grouped_qkv(spec: ModelSpec, name: str, biased: bool) -> Wholes:
    """One matrix, in which the query heads of each key head are followed by that key head and its value head."""
    group, size = spec.num_heads // spec.num_kv_heads, spec.head_dim
    rows = np.arange(spec.query_size + 2 * spec.kv_size).reshape(spec.num_kv_heads, group + 2, size)
    parts = {"q_proj": rows[:, :group], "k_proj": rows[:, group], "v_proj": rows[:, group + 1]}

    def whole(kind: str, *columns: int) -> CombinedTensor:
        return CombinedTensor(
            (rows.size, *columns),
            tuple(
                TensorPart(f"self_attn.{part}.{kind}", 0, (taken.size, *columns), rows=taken.reshape(-1))
                for part, taken in parts.items()
            ),
        )

    wholes = {f"{name}.weight": whole("weight", spec.hidden_size)}
    return wholes | {f"{name}.bias": whole("bias")} if biased else wholes


def _gpt_neox(spec: ModelSpec) -> Wholes:
    return _grouped_qkv(spec, "attention.query_key_value", spec.qkv_bias)


def _falcon(spec: ModelSpec) -> Wholes:
    return _grouped_qkv(spec, "self_attention.query_key_value", spec.qkv_bias)


def _gemma4(spec: ModelSpec) -> Wholes:
    """``fused_experts`` under other names."""
    return {name.removeprefix("mlp."): whole for name, whole in fused_experts(spec).items()}


def _glm(spec: ModelSpec) -> Wholes:
    """One matrix for gate and up."""
    return {name: whole for name, whole in _phi3(spec).items() if name.startswith("mlp.")}


_MIXTRAL_EXPERTS = (
    (r"block_sparse_moe\.gate\.", "mlp.gate."),
    (r"block_sparse_moe\.experts\.(\d+)\.w1\.", r"mlp.experts.\1.gate_proj."),
    (r"block_sparse_moe\.experts\.(\d+)\.w2\.", r"mlp.experts.\1.down_proj."),
    (r"block_sparse_moe\.experts\.(\d+)\.w3\.", r"mlp.experts.\1.up_proj."),
)
_HUNYUANS_NORMS = (
    (r"self_attn\.query_layernorm\.", "self_attn.q_norm."),
    (r"self_attn\.key_layernorm\.", "self_attn.k_norm."),
)
_SHARED_EXPERTS = (r"mlp\.shared_experts\.", "mlp.shared_expert.")
_PLAIN_MLP = (
    (r"mlp\.(c_fc|fc1|dense_h_to_4h)\.", "mlp.up_proj."),
    (r"mlp\.(c_proj|fc2|dense_4h_to_h)\.", "mlp.down_proj."),
)


def _gpt2(spec: ModelSpec) -> Wholes:
    """GPT-2's matrices are (in, out); one has queries, keys and values side by side."""
    hidden, inner = spec.hidden_size, spec.intermediate_size

    def turned(name: str, rows: int, columns: int) -> CombinedTensor:
        return CombinedTensor((columns, rows), (TensorPart(name, 0, (rows, columns), (1, rows)),))

    parts = ("q_proj", "k_proj", "v_proj")
    weights = [
        TensorPart(f"self_attn.{part}.weight", index * hidden, (hidden, hidden), (1, 3 * hidden))
        for index, part in enumerate(parts)
    ]
    biases = [TensorPart(f"self_attn.{part}.bias", index * hidden, (hidden,)) for index, part in enumerate(parts)]
    return {
        "attn.c_attn.weight": CombinedTensor((hidden, 3 * hidden), tuple(weights)),
        "attn.c_attn.bias": CombinedTensor((3 * hidden,), tuple(biases)),
        "attn.c_proj.weight": turned("self_attn.o_proj.weight", hidden, hidden),
        "mlp.c_fc.weight": turned("mlp.up_proj.weight", inner, hidden),
        "mlp.c_proj.weight": turned("mlp.down_proj.weight", hidden, inner),
    }


def _internlm2(spec: ModelSpec) -> Wholes:
    return _grouped_qkv(spec, "attention.wqkv", spec.qkv_bias)


_DEFAULT = Naming(renamed=(_SHARED_EXPERTS,), wholes=fused_experts)
_WITH_DRAFT_LAYERS = Naming(renamed=(_SHARED_EXPERTS,), wholes=fused_experts, has_draft_layers=True)
_NAMINGS = {
    **HYBRIDS,
    "DeepseekV3ForCausalLM": _WITH_DRAFT_LAYERS,
    "ExaoneForCausalLM": Naming(
        prefixes=(
            ("transformer.h.", "model.layers."),
            ("transformer.wte.", "model.embed_tokens."),
            ("transformer.ln_f.", "model.norm."),
        ),
        renamed=(
            (r"ln_1\.", "input_layernorm."),
            (r"ln_2\.", "post_attention_layernorm."),
            (r"attn\.attention\.out_proj\.", "self_attn.o_proj."),
            (r"attn\.attention\.", "self_attn."),
            (r"mlp\.c_fc_0\.", "mlp.gate_proj."),
            (r"mlp\.c_fc_1\.", "mlp.up_proj."),
            (r"mlp\.c_proj\.", "mlp.down_proj."),
        ),
    ),
    "GPT2LMHeadModel": Naming(
        prefixes=tuple(
            (base + old, new)
            for base in ("transformer.", "")
            for old, new in (
                ("h.", "model.layers."),
                ("wte.", "model.embed_tokens."),
                ("wpe.", "model.embed_positions."),
                ("ln_f.", "model.norm."),
            )
        ),
        renamed=(
            (r"ln_1\.", "input_layernorm."),
            (r"ln_2\.", "post_attention_layernorm."),
            (r"attn\.c_proj\.", "self_attn.o_proj."),
            *_PLAIN_MLP,
        ),
        wholes=_gpt2,
    ),
    "InternLM2ForCausalLM": Naming(
        prefixes=(("model.tok_embeddings.", "model.embed_tokens."), ("output.", "lm_head.")),
        renamed=(
            (r"attention_norm\.", "input_layernorm."),
            (r"ffn_norm\.", "post_attention_layernorm."),
            (r"attention\.wo\.", "self_attn.o_proj."),
            (r"feed_forward\.w1\.", "mlp.gate_proj."),
            (r"feed_forward\.w2\.", "mlp.down_proj."),
            (r"feed_forward\.w3\.", "mlp.up_proj."),
        ),
        wholes=_internlm2,
    ),
    "OPTForCausalLM": Naming(
        prefixes=tuple(
            (base + old, new)
            for base in ("model.decoder.", "decoder.")
            for old, new in (
                ("layers.", "model.layers."),
                ("embed_tokens.", "model.embed_tokens."),
                ("embed_positions.", "model.embed_positions."),
                ("final_layer_norm.", "model.norm."),
            )
        ),
        renamed=(
            (r"self_attn_layer_norm\.", "input_layernorm."),
            (r"final_layer_norm\.", "post_attention_layernorm."),
            (r"self_attn\.out_proj\.", "self_attn.o_proj."),
            (r"fc1\.", "mlp.up_proj."),
            (r"fc2\.", "mlp.down_proj."),
        ),
    ),
    "FalconForCausalLM": Naming(
        prefixes=(
            ("transformer.h.", "model.layers."),
            ("transformer.word_embeddings.", "model.embed_tokens."),
            ("transformer.ln_f.", "model.norm."),
        ),
        renamed=(
            (r"ln_attn\.", "input_layernorm."),
            (r"ln_mlp\.", "post_attention_layernorm."),
            (r"self_attention\.dense\.", "self_attn.o_proj."),
            *_PLAIN_MLP,
        ),
        wholes=_falcon,
    ),
    "GPTNeoXForCausalLM": Naming(
        prefixes=(
            ("gpt_neox.layers.", "model.layers."),
            ("gpt_neox.embed_in.", "model.embed_tokens."),
            ("gpt_neox.final_layer_norm.", "model.norm."),
            ("embed_out.", "lm_head."),
        ),
        renamed=((r"attention\.dense\.", "self_attn.o_proj."), *_PLAIN_MLP),
        wholes=_gpt_neox,
    ),
    "Gemma4ForCausalLM": Naming(
        renamed=(
            (r"router\.proj\.", "mlp.gate."),
            (r"router\.scale$", "mlp.gate_norm.weight"),
            (r"router\.per_expert_scale$", "mlp.gate.per_expert_scale"),
            (r"experts\.", "mlp.experts."),
            (r"pre_feedforward_layernorm_2\.", "mlp.experts_norm."),
            (r"post_feedforward_layernorm_2\.", "mlp.experts_post_norm."),
            (r"post_feedforward_layernorm_1\.", "mlp.dense_post_norm."),
        ),
        wholes=_gemma4,
    ),
    "Glm4ForCausalLM": Naming(
        renamed=(
            (r"post_attention_layernorm\.", "pre_feedforward_layernorm."),
            (r"post_self_attn_layernorm\.", "post_attention_layernorm."),
            (r"post_mlp_layernorm\.", "post_feedforward_layernorm."),
        ),
        wholes=_glm,
    ),
    "Glm4MoeForCausalLM": _WITH_DRAFT_LAYERS,
    "Glm4MoeLiteForCausalLM": _WITH_DRAFT_LAYERS,
    "GlmForCausalLM": Naming(wholes=_glm),
    "GptOssForCausalLM": Naming(renamed=((r"mlp\.router\.", "mlp.gate."),), wholes=_gpt_oss),
    "GraniteMoeForCausalLM": Naming(renamed=((r"block_sparse_moe\.router\.layer\.", "mlp.gate."),), wholes=granite_moe),
    "HunYuanDenseV1ForCausalLM": Naming(renamed=_HUNYUANS_NORMS),
    "HunYuanMoEV1ForCausalLM": Naming(
        renamed=(
            *_HUNYUANS_NORMS,
            (r"mlp\.gate\.wg\.", "mlp.gate."),
            (r"mlp\.shared_mlp\.", "mlp.shared_expert."),
        ),
        wholes=fused_experts,
    ),
    "Llama4ForCausalLM": Naming(
        renamed=((r"feed_forward\.router\.", "mlp.gate."), (r"feed_forward\.", "mlp.")), wholes=_llama4
    ),
    "MiniMaxM2ForCausalLM": Naming(
        renamed=(
            *_MIXTRAL_EXPERTS,
            (r"(block_sparse_moe|mlp)\.e_score_correction_bias$", "mlp.gate.e_score_correction_bias"),
        ),
        wholes=fused_experts,
        has_draft_layers=True,
    ),
    "MixtralForCausalLM": Naming(renamed=_MIXTRAL_EXPERTS, wholes=fused_experts),
    "MllamaForCausalLM": Naming(image_rows=8),
    "Phi3ForCausalLM": Naming(wholes=_phi3),
    "PhiForCausalLM": Naming(
        prefixes=(("model.final_layernorm.", "model.norm."),),
        renamed=((r"self_attn\.dense\.", "self_attn.o_proj."), *_PLAIN_MLP),
    ),
    "Starcoder2ForCausalLM": Naming(renamed=_PLAIN_MLP),
}


def naming_of(architecture: str) -> Naming:
    """Returns how an architecture's checkpoints name and combine tensors: as Llama's do, and its mixtures of experts as
    Qwen3's and GLM-4.5's, unless the architecture has a naming of its own."""
    return _NAMINGS.get(architecture, _DEFAULT)

"""The names and layouts of tensors in checkpoints of models with recurrent layers."""

import numpy as np
from numpy.typing import NDArray

from penstock.models.architecture.recurrent import GatedDeltaNet
from penstock.models.architecture.spec import ModelSpec
from penstock.models.checkpoint.combined_tensors import CombinedTensor, Naming, TensorPart, Wholes
from penstock.models.checkpoint.expert_layouts import fused_experts, granite_moe, stacked

_LFM2_PREFIXES = (("model.embedding_norm.", "model.norm."),)
_LFM2_NAMES = (
    (r"operator_norm\.", "input_layernorm."),
    (r"ffn_norm\.", "post_attention_layernorm."),
    (r"self_attn\.out_proj\.", "self_attn.o_proj."),
    (r"self_attn\.([qk])_layernorm\.", r"self_attn.\1_norm."),
    (r"feed_forward\.w1\.", "mlp.gate_proj."),
    (r"feed_forward\.w2\.", "mlp.down_proj."),
    (r"feed_forward\.w3\.", "mlp.up_proj."),
)
_LFM2_EXPERTS = (
    (r"feed_forward\.gate\.", "mlp.gate."),
    (r"feed_forward\.expert_bias$", "mlp.gate.e_score_correction_bias"),
    (r"feed_forward\.experts\.(\d+)\.w1\.", r"mlp.experts.\1.gate_proj."),
    (r"feed_forward\.experts\.(\d+)\.w2\.", r"mlp.experts.\1.down_proj."),
    (r"feed_forward\.experts\.(\d+)\.w3\.", r"mlp.experts.\1.up_proj."),
)


def _lfm2_moe(spec: ModelSpec) -> Wholes:
    """``fused_experts`` under another name."""
    return {name.replace("mlp.", "feed_forward."): whole for name, whole in fused_experts(spec).items()}


def _granite_hybrid(spec: ModelSpec) -> Wholes:
    """Gate and up are one matrix, of the MLP or of the one beside the experts."""
    experts, hidden = spec.experts, spec.hidden_size
    name, inner = ("mlp", spec.intermediate_size) if experts is None else ("mlp.shared_expert", experts.shared_size)
    down = TensorPart(f"{name}.down_proj.weight", 0, (hidden, inner))
    return {
        **({} if experts is None else granite_moe(spec)),
        "shared_mlp.input_linear.weight": stacked(
            hidden, {f"{name}.gate_proj.weight": inner, f"{name}.up_proj.weight": inner}
        ),
        "shared_mlp.output_linear.weight": CombinedTensor((hidden, inner), (down,)),
    }


def _qwen3_next(spec: ModelSpec) -> Wholes:
    """Qwen3-Next's layout: for each key head its query, its key, and the values and z of its value heads; likewise beta
    and alpha; and for each query head of attention the query and its gate."""
    kinds = {kind for kind in spec.recurrent if isinstance(kind, GatedDeltaNet)}
    queries = np.arange(2 * spec.query_size).reshape(spec.num_heads, 2, spec.head_dim)
    wholes = {
        **fused_experts(spec),
        "self_attn.q_proj.weight": _parts(
            {"self_attn.q_proj.weight": queries[:, 0], "self_attn.gate_proj.weight": queries[:, 1]}, spec.hidden_size
        ),
    }
    if spec.qkv_bias:
        wholes["self_attn.q_proj.bias"] = _parts(
            {"self_attn.q_proj.bias": queries[:, 0], "self_attn.gate_proj.bias": queries[:, 1]}
        )
    for net in kinds:
        size, values = net.key_size, net.values // net.num_key_heads
        rows = np.arange(2 * net.keys + 2 * net.values).reshape(net.num_key_heads, -1)
        query, key, value, z = np.split(rows, np.cumsum([size, size, values]), axis=1)
        qkv = np.concatenate([part.reshape(-1) for part in (query, key, value)])
        heads = np.arange(2 * net.num_value_heads).reshape(net.num_key_heads, 2, -1)
        prefix = "linear_attn.in_proj_"
        wholes[f"{prefix}qkvz.weight"] = _parts({f"{prefix}qkv.weight": qkv, f"{prefix}z.weight": z}, spec.hidden_size)
        wholes[f"{prefix}ba.weight"] = _parts(
            {f"{prefix}b.weight": heads[:, 0], f"{prefix}a.weight": heads[:, 1]}, spec.hidden_size
        )
    return wholes


def _parts(rows: dict[str, NDArray[np.int64]], *columns: int) -> CombinedTensor:
    """Returns a matrix of tensors that consist of these rows, or a vector of them."""
    return CombinedTensor(
        (sum(taken.size for taken in rows.values()), *columns),
        tuple(TensorPart(name, 0, (taken.size, *columns), rows=taken.reshape(-1)) for name, taken in rows.items()),
    )


_QWEN = Naming(renamed=((r"mlp\.shared_experts\.", "mlp.shared_expert."),), wholes=_qwen3_next, left_out=("mtp.",))
_NEMOTRON = Naming(
    prefixes=tuple(
        (base + old, new)
        for base in ("backbone.", "model.")
        for old, new in (
            ("layers.", "model.layers."),
            ("embeddings.", "model.embed_tokens."),
            ("norm_f.", "model.norm."),
        )
    ),
    renamed=(
        (r"mixer\.([qkvo])_proj\.", r"self_attn.\1_proj."),
        (r"mixer\.(up|down)_proj\.", r"mlp.\1_proj."),
        (r"mixer\.(gate|experts)\.", r"mlp.\1."),
        (r"mixer\.shared_experts\.", "mlp.shared_expert."),
        (r"mixer\.", "mamba."),
    ),
    left_out=("mtp.",),
)
_FALCON = Naming(
    prefixes=(("model.final_layernorm.", "model.norm."),),
    renamed=((r"pre_ff_layernorm\.", "post_attention_layernorm."), (r"feed_forward\.", "mlp.")),
)
HYBRIDS = {
    "FalconH1ForCausalLM": _FALCON,
    "GraniteMoeHybridForCausalLM": Naming(
        renamed=((r"block_sparse_moe\.router\.(layer\.)?", "mlp.gate."),), wholes=_granite_hybrid
    ),
    "Lfm2ForCausalLM": Naming(prefixes=_LFM2_PREFIXES, renamed=_LFM2_NAMES),
    "Lfm2MoeForCausalLM": Naming(prefixes=_LFM2_PREFIXES, renamed=(*_LFM2_EXPERTS, *_LFM2_NAMES), wholes=_lfm2_moe),
    "NemotronHForCausalLM": _NEMOTRON,
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
}
"""The namings of these architectures."""

"""The layouts of experts, and of other matrices that stand one above the other, in checkpoints of several families."""

from collections.abc import Mapping
from dataclasses import replace

from penstock.models.architecture.spec import ModelSpec
from penstock.models.checkpoint.combined_tensors import CombinedTensor, TensorPart, Wholes


def stacked(columns: int, rows: Mapping[str, int]) -> CombinedTensor:
    """Matrices with these numbers of rows, one above the other."""
    parts, above = [], 0
    for name, count in rows.items():
        parts.append(TensorPart(name, above * columns, (count, columns)))
        above += count
    return CombinedTensor((above, columns), tuple(parts))


def fused_experts(spec: ModelSpec) -> Wholes:
    """The experts' layout in transformers 5, which it also saves unless it writes the original format: (experts, 2
    inner, hidden) with gate above up, and (experts, hidden, inner). Qwen3-VL-MoE exchanges the last two. Empty for a
    model without experts.
    """
    experts = spec.experts
    if experts is None:
        return {}
    num, inner, hidden = experts.num_experts, experts.intermediate_size, spec.hidden_size
    size = inner * hidden
    gate_up = [
        TensorPart(f"mlp.experts.{expert}.{name}.weight", (2 * expert + half) * size, (inner, hidden))
        for expert in range(num)
        for half, name in enumerate(("gate_proj", "up_proj"))
    ]
    down = [
        TensorPart(f"mlp.experts.{expert}.down_proj.weight", expert * size, (hidden, inner)) for expert in range(num)
    ]
    gate_up_turned = [
        TensorPart(
            f"mlp.experts.{expert}.{name}.weight", (2 * expert * hidden + half) * inner, (inner, hidden), (1, 2 * inner)
        )
        for expert in range(num)
        for half, name in enumerate(("gate_proj", "up_proj"))
    ]
    down_turned = [replace(part, strides=(1, hidden)) for part in down]
    return {
        "mlp.experts.gate_up_proj": CombinedTensor(
            (num, 2 * inner, hidden), tuple(gate_up), CombinedTensor((num, hidden, 2 * inner), tuple(gate_up_turned))
        ),
        "mlp.experts.down_proj": CombinedTensor(
            (num, hidden, inner), tuple(down), CombinedTensor((num, inner, hidden), tuple(down_turned))
        ),
    }


def granite_moe(spec: ModelSpec) -> Wholes:
    """``fused_experts`` under other names."""
    fused = fused_experts(spec)
    return {
        "block_sparse_moe.input_linear.weight": fused["mlp.experts.gate_up_proj"],
        "block_sparse_moe.output_linear.weight": fused["mlp.experts.down_proj"],
    }

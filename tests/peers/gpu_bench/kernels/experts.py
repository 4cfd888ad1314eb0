"""The cases of a mixture of experts: few tokens, which read weights, and many, which are multiplied."""

from functools import partial

import torch
from torch import Tensor

from gpu_bench.kernels.cases import ULP, Case, Make, distance
from gpu_bench.sizes import Model, Sizes
from penstock.kernels.cuda.moe.fused_moe import ExpertsWeights, ExpertsWorkspace, fused_moe
from penstock.kernels.cuda.moe.grouped_mm import grouped_moe, has_grouped_mm
from penstock.kernels.cuda.moe.shapes import ExpertsShape
from penstock.kernels.reference import ops as reference


def mixture(model: Model, sizes: Sizes, device: torch.device, *, decodes: bool, by_torch: bool = False) -> Case:
    """fused_moe, routing with it; ``by_torch``: with torch's grouped_mm for the products."""
    shape = ExpertsShape.of(model.shape)
    tokens = sizes.kernels.batch if decodes else sizes.kernels.tokens
    experts, hidden, inner = shape.mixture.num_experts, shape.hidden_size, shape.intermediate_size

    def made(*size: int, scale: float) -> Tensor:
        return torch.randn(size, device=device, dtype=shape.dtype).mul_(scale)

    biases = [made(experts, width, scale=1.0) if shape.mixture.biased else None for width in (2 * inner, hidden)]
    gate_up = made(experts, 2 * inner, hidden, scale=hidden**-0.5)
    weights = ExpertsWeights(gate_up, made(experts, hidden, inner, scale=inner**-0.5), *biases)
    x = made(tokens, hidden, scale=1.0)
    logits = torch.randn(tokens, experts, device=device).to(shape.logits_dtype)
    query_starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    out = torch.empty_like(x)
    room = ExpertsWorkspace.allocate(shape, tokens, device)
    if by_torch and not has_grouped_mm(shape, device):
        raise NotImplementedError("torch has no grouped_mm for these experts on this device")
    product = grouped_moe if by_torch else fused_moe
    run = partial(product, shape, x, logits, weights, query_starts, room, out)

    def error() -> float:
        run()
        return distance(out, expected_of(shape, x.float(), logits.float(), weights))

    used = len(set(logits.topk(shape.mixture.per_token, dim=1).indices.flatten().tolist()))
    num_bytes = used * 3 * hidden * inner * shape.dtype.itemsize + x.nbytes + out.nbytes
    products = 6.0 * shape.num_pairs(tokens) * hidden * inner
    text = f"{tokens} tokens" + ", torch grouped_mm" * by_torch
    return Case(product.__name__, text, error, ULP[shape.dtype], run, num_bytes, products)


def expected_of(shape: ExpertsShape, x: Tensor, logits: Tensor, weights: ExpertsWeights) -> Tensor:
    """In fp32, an expert at a time."""
    chosen, probabilities = reference.choose_experts(logits, shape.mixture.per_token, shape.mixture.normalise)
    out = torch.zeros_like(x)
    for expert in range(shape.mixture.num_experts):
        tokens, place = torch.where(chosen == expert)
        made = x[tokens] @ weights.gate_up[expert].float().t()
        if weights.gate_up_bias is not None:
            made += weights.gate_up_bias[expert].float()
        if shape.clamped_gate is None:
            made = reference.gated_activation(made, shape.activation)
        else:
            made = reference.clamped_gate(made, *shape.clamped_gate)
        made = made @ weights.down[expert].float().t()
        if weights.down_bias is not None:
            made += weights.down_bias[expert].float()
        out.index_add_(0, tokens, made * probabilities[tokens, place].unsqueeze(1))
    return out


CASES: list[Make] = [partial(mixture, decodes=True), partial(mixture, decodes=False)]

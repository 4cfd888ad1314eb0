"""A mixture of experts whose two products are torch's ``grouped_mm``, for steps of many tokens. From how many tokens on
it is faster than ``fused_moe`` depends on the GPU, so it is measured.

Nothing here waits for the device, so a CUDA graph can capture it. The GPU must be one for which torch has a kernel:
elsewhere torch multiplies expert by expert, and reads the groups' sizes on the host.
"""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor
from torch.nn import functional

from penstock.kernels.cuda.activation import gated_activation, gated_activation_variant
from penstock.kernels.cuda.core.common import check
from penstock.kernels.cuda.core.launch import ALIGNMENT, KernelVariant, capability_of
from penstock.kernels.cuda.moe.fused_moe import ExpertsWeights, ExpertsWorkspace
from penstock.kernels.cuda.moe.gemm import sum_variant
from penstock.kernels.cuda.moe.routing import expert_ends, route
from penstock.kernels.cuda.moe.shapes import ExpertsShape

CAPABILITIES = (90, 100)
"""The compute capabilities of GPUs for which torch has a kernel: Hopper and the Blackwell of data centres."""
MEASURED_TOKENS = (512, 2048, 8192)
"""The numbers of tokens at which both are measured, and from which ``grouped_mm`` may be used."""


def has_grouped_mm(shape: ExpertsShape, device: torch.device) -> bool:
    """Whether torch can multiply by these experts on a device: plain ones in bf16, with a gate and aligned rows."""
    mixture = shape.mixture
    is_plain = shape.gated and not (mixture.biased or mixture.scales_inputs or shape.is_fp4 or shape.deterministic)
    sizes = (shape.hidden_size, shape.intermediate_size)
    is_aligned = all(size * shape.dtype.itemsize % ALIGNMENT == 0 for size in sizes)
    can = is_plain and is_aligned and shape.clamped_gate is None and shape.dtype == torch.bfloat16
    has_kernel = device.type != "cuda" or capability_of(device) in CAPABILITIES
    return can and has_kernel and hasattr(functional, "grouped_mm")


def grouped_moe_bytes(shape: ExpertsShape, num_tokens: int) -> int:
    """Returns the memory that ``grouped_moe`` takes besides its workspace."""
    columns = 2 * shape.hidden_size + 3 * shape.intermediate_size
    return shape.num_pairs(num_tokens) * columns * shape.dtype.itemsize


def grouped_moe_variants(shape: ExpertsShape) -> Iterator[KernelVariant]:
    """The variants that ``grouped_moe`` launches and ``fused_moe`` does not."""
    yield gated_activation_variant(shape.dtype, shape.intermediate_size, shape.activation)
    yield sum_variant(shape.dtype, shape.hidden_size, shape.mixture.per_token, is_grouped=True)


def grouped_moe(
    shape: ExpertsShape,
    x: Tensor,
    logits: Tensor,
    weights: ExpertsWeights,
    query_starts: Tensor,
    room: ExpertsWorkspace,
    out: Tensor,
) -> None:
    """Computes what ``fused_moe`` does, with the same arguments; ``has_grouped_mm`` must hold. An expert's output is
    rounded to the model's dtype before it is multiplied by the token's factor, not after."""
    num_tokens, per_token = x.shape[0], shape.mixture.per_token
    check(x, (num_tokens, shape.hidden_size), shape.dtype)
    check(out, (num_tokens, shape.hidden_size), shape.dtype)
    weights.check(shape)
    room.check(shape, num_tokens)
    routes, num_pairs = room.routes, shape.num_pairs(num_tokens)
    route(shape.mixture, shape.tiles(num_tokens).block_m, logits, query_starts, routes)

    ends = expert_ends(shape.mixture, routes, num_tokens)
    places = torch.arange(num_pairs, dtype=torch.int32, device=x.device)
    is_padding = places >= ends[-1:]
    pairs = routes.pairs[:num_pairs]
    inputs = x.index_select(0, pairs.masked_fill(is_padding, 0) // per_token)
    gate_up = functional.grouped_mm(inputs, weights.gate_up.transpose(1, 2), offs=ends)
    activations = gate_up.new_empty(num_pairs, shape.intermediate_size)
    gated_activation(gate_up, shape.activation, activations)
    parts = functional.grouped_mm(activations, weights.down.transpose(1, 2), offs=ends)

    place_of_pair = places.new_empty(num_pairs + 1)
    place_of_pair.scatter_(0, pairs.masked_fill(is_padding, num_pairs).long(), places)
    variant = sum_variant(shape.dtype, shape.hidden_size, per_token, is_grouped=True)
    grid = (num_tokens, triton.cdiv(shape.hidden_size, variant.constants["BLOCK"]))
    variant.launch(grid, parts, place_of_pair, routes.weights, query_starts, out, query_starts.shape[0] - 1)

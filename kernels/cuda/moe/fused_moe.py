"""A mixture of experts, which replaces a layer's MLP. Computes everything after the router's logits.

The host does not know the number of tiles. It launches programs for the maximum number, so that one CUDA graph works
for any routing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from penstock.kernels.cuda.core.common import check
from penstock.kernels.cuda.core.launch import KernelVariant
from penstock.kernels.cuda.moe.gemm import down_variant, gate_up_variant, sum_variant
from penstock.kernels.cuda.moe.routing import Routes, group_variant, route, route_variant
from penstock.kernels.cuda.moe.shapes import FP4_GROUP, ExpertsShape


@dataclass(frozen=True)
class ExpertsWeights:
    """The weights of a layer's E experts, in the model's dtype, or in MXFP4 if the shape has it. Then two columns share
    a byte, the first one its low half, and each 32 columns of a row have an exponent."""

    gate_up: Tensor
    """(E, 2I, H): gate, then up; without a gate (E, I, H). In MXFP4 (E, 2I, H / 2)."""
    down: Tensor
    """(E, H, I). In MXFP4 (E, H, I / 2)."""
    gate_up_bias: Tensor | None = None
    """(E, 2I), or (E, I). Either both biases are given or neither."""
    down_bias: Tensor | None = None
    """(E, H)."""
    gate_up_exponents: Tensor | None = None
    """(E, 2I, H / 32) uint8: powers of 2, plus 127."""
    down_exponents: Tensor | None = None
    """(E, H, I / 32) uint8."""

    def check(self, shape: ExpertsShape) -> None:
        experts, hidden, inner = shape.mixture.num_experts, shape.hidden_size, shape.intermediate_size
        for weight, exponents, rows, columns in (
            (self.gate_up, self.gate_up_exponents, shape.first_rows, hidden),
            (self.down, self.down_exponents, hidden, inner),
        ):
            assert (exponents is not None) == shape.is_fp4
            if exponents is None:
                check(weight, (experts, rows, columns), shape.dtype)
            else:
                check(weight, (experts, rows, columns // 2), torch.uint8)
                check(exponents, (experts, rows, columns // FP4_GROUP), torch.uint8)
        for bias, width in ((self.gate_up_bias, shape.first_rows), (self.down_bias, hidden)):
            assert (bias is not None) == shape.mixture.biased
            if bias is not None:
                check(bias, (experts, width), shape.dtype)


@dataclass(frozen=True)
class ExpertsWorkspace:
    """The kernels' intermediate results. The layers of a model share one instance, one after another."""

    routes: Routes
    activations: Tensor
    """(P, I) in the model's dtype, in the order of ``routes.pairs``."""
    parts: Tensor
    """(P, H) in the model's dtype: the weighted results, with those of a token adjacent."""

    @classmethod
    def allocate(cls, shape: ExpertsShape, max_tokens: int, device: torch.device) -> "ExpertsWorkspace":
        """Allocates room for steps of up to ``max_tokens`` tokens."""
        pairs = shape.num_pairs(max_tokens)
        return cls(
            routes=Routes.allocate(shape, max_tokens, device),
            activations=torch.empty((pairs, shape.intermediate_size), dtype=shape.dtype, device=device),
            parts=torch.empty((pairs, shape.hidden_size), dtype=shape.dtype, device=device),
        )

    def check(self, shape: ExpertsShape, num_tokens: int) -> None:
        max_pairs = self.parts.shape[0]
        assert shape.num_pairs(num_tokens) <= max_pairs
        assert shape.max_tiles(num_tokens, shape.tiles(num_tokens).block_m) <= self.routes.tiles.shape[0]
        check(self.activations, (max_pairs, shape.intermediate_size), shape.dtype)
        check(self.parts, (max_pairs, shape.hidden_size), shape.dtype)


def fused_moe_variants(shape: ExpertsShape) -> Iterator[KernelVariant]:
    """All variants that ``fused_moe`` launches, for any number of tokens."""
    mixture = shape.mixture
    yield route_variant(mixture, shape.logits_dtype)
    yield group_variant(mixture.num_experts, mixture.per_token)
    for tiles in shape.all_tiles:
        yield gate_up_variant(shape, tiles)
        yield down_variant(shape, tiles)
    yield sum_variant(shape.dtype, shape.hidden_size, mixture.per_token)


def fused_moe(
    shape: ExpertsShape,
    x: Tensor,
    logits: Tensor,
    weights: ExpertsWeights,
    query_starts: Tensor,
    room: ExpertsWorkspace,
    out: Tensor,
) -> None:
    """out_t = sum over t's experts e of p_te * (down_e(act(g) * u) + b_e), where g = gate_e(x_t), u = up_e(x_t).

    Without a gate, act(u) replaces act(g) * u. If the mixture scales inputs, it is the sum of down_e(act(g) * u) + b_e,
    with gate_e and up_e of p_te x_t.

    ``x`` and ``out`` are (T, H) in the model's dtype and may be the same tensor; ``logits`` (T, E) come from the
    router. A token's experts are those of its k largest logits, and p_te is their softmax; see ``route``. Each term,
    p_te times an expert's output, is rounded to the model's dtype; terms are summed in fp32, likeliest expert first. A
    token's result depends on no other token, and is bitwise the same with ``shape.deterministic`` or the same
    ``shape.tiles``. ``query_starts`` (B + 1,) int32 ends with the number of valid tokens; ``out`` is not written for
    the others.
    """
    num_tokens = x.shape[0]
    check(x, (num_tokens, shape.hidden_size), shape.dtype)
    check(out, (num_tokens, shape.hidden_size), shape.dtype)
    check(logits, (num_tokens, shape.mixture.num_experts), shape.logits_dtype)
    weights.check(shape)
    room.check(shape, num_tokens)
    tiles = shape.tiles(num_tokens)
    routes = room.routes
    route(shape.mixture, tiles.block_m, logits, query_starts, routes)

    max_tiles = shape.max_tiles(num_tokens, tiles.block_m)
    inner_blocks = triton.cdiv(shape.intermediate_size, tiles.gate_up.block_n)
    gate_up_variant(shape, tiles).launch(
        (max_tiles * inner_blocks,),
        x,
        weights.gate_up,
        weights.gate_up_exponents,
        weights.gate_up_bias,
        routes.weights if shape.mixture.scales_inputs else None,
        *routes.grouped,
        room.activations,
    )
    hidden_blocks = triton.cdiv(shape.hidden_size, tiles.down.block_n)
    down_variant(shape, tiles).launch(
        (max_tiles * hidden_blocks,),
        room.activations,
        weights.down,
        weights.down_exponents,
        weights.down_bias,
        None if shape.mixture.scales_inputs else routes.weights,
        *routes.grouped,
        room.parts,
    )
    variant = sum_variant(shape.dtype, shape.hidden_size, shape.mixture.per_token)
    grid = (num_tokens, triton.cdiv(shape.hidden_size, variant.constants["BLOCK"]))
    variant.launch(grid, room.parts, None, None, query_starts, out, query_starts.shape[0] - 1)

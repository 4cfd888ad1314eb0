"""The gate after a recurrent layer's scan, and its norm. A program computes one head, or one group, of a token."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import await_inputs, check, load_wide, num_warps
from penstock.kernels.cuda.core.launch import KernelVariant


@triton.jit
def _gated_norm(
    x, gates, weight, y, COLUMNS: tl.constexpr, FIRST: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    WEIGHTS: tl.constexpr, GATES_FIRST: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(x + token * (PARTS * WIDTH) + part * WIDTH + columns, mask=inside, other=0.0)
    gate = load_wide(gates + token * COLUMNS + FIRST + part * WIDTH + columns, inside)
    gate *= tl.sigmoid(gate)
    if GATES_FIRST:
        value *= gate
    if weight is not None:
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + EPS)
        value *= tl.load(weight + (part % WEIGHTS) * WIDTH + columns, mask=inside, other=0.0)
    if not GATES_FIRST:
        value *= gate
    tl.store(y + token * (PARTS * WIDTH) + part * WIDTH + columns, value.to(y.dtype.element_ty), mask=inside)


@dataclass(frozen=True, kw_only=True)
class GatedNormShape:
    """The properties of a layer that ``gated_norm`` is compiled for."""

    dtype: torch.dtype
    columns: int
    """The columns of the inputs' linear."""
    first: int
    """The linear's column of the first gate."""
    parts: int
    """The heads or groups, each of which is normed by itself."""
    width: int
    """The columns of a part."""
    weights: int
    """The rows of the weight: one for each part, or one for all; 0: there is no norm, only the gate."""
    gates_first: bool
    """Whether the gate precedes the norm."""
    eps: float


@cache
def gated_norm_variant(shape: GatedNormShape) -> KernelVariant:
    """The variant of ``gated_norm`` for a kind of layer."""
    block = triton.next_power_of_2(shape.width)
    return KernelVariant(
        _gated_norm,
        {
            "x": torch.float32,
            "gates": shape.dtype,
            "weight": torch.float32 if shape.weights else None,
            "y": shape.dtype,
        },
        {
            "COLUMNS": shape.columns, "FIRST": shape.first, "PARTS": shape.parts, "WIDTH": shape.width,
            "WEIGHTS": shape.weights, "GATES_FIRST": shape.gates_first, "EPS": shape.eps, "BLOCK": block,
        },
        num_warps=num_warps(block),
    )  # fmt: skip


def gated_norm(shape: GatedNormShape, x: Tensor, gates: Tensor, weight: Tensor | None, y: Tensor) -> None:
    """y = norm(x) weight silu(z), or norm(x silu(z)) weight, with the RMS norm of each part; without a weight, y = x
    silu(z).

    ``x`` is (T, parts * width) in fp32, ``gates`` (T, columns) has z from column ``first`` on, ``weight`` is (weights,
    width) in fp32, and ``y`` is (T, parts * width).
    """
    tokens, _ = x.shape
    check(x, (tokens, shape.parts * shape.width), torch.float32)
    check(gates, (tokens, shape.columns), shape.dtype)
    if weight is not None:
        check(weight, (shape.weights, shape.width), torch.float32)
    check(y, x.shape, shape.dtype)
    gated_norm_variant(shape).launch((tokens, shape.parts), x, gates, weight, y)

"""Prepares a product's inputs for its kernel: quantises them to bytes with a scale per token, or reorders their
columns."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import MAX_FP8, await_inputs, check, load_wide, num_warps
from penstock.kernels.cuda.core.launch import KernelVariant

BLOCK_GATHERED = 2048
"""The maximum number of columns per program."""
MAX_INT8 = tl.constexpr(127.0)
ROUNDER = tl.constexpr(1.5 * 2**23)
"""Adding this to a float32 and subtracting it again rounds to the nearest integer, ties to even."""


@triton.jit
def _narrow(
    x,
    out,
    scales,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program quantises one token: GROUPS groups in blocks of BLOCK columns, of which the first GROUP belong to the
    group."""
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    groups, column = tl.arange(0, GROUPS), tl.arange(0, BLOCK)
    columns = groups[:, None] * GROUP + column[None, :]
    inside = (columns < WIDTH) & (column < GROUP)[None, :]
    row = load_wide(x + token * WIDTH + columns, inside)
    is_whole: tl.constexpr = out.dtype.element_ty == tl.int8
    limit: tl.constexpr = MAX_INT8 if is_whole else MAX_FP8
    largest = tl.max(tl.abs(row), axis=1)
    # NaN or infinity in a row makes the scale NaN, and so all the token's results.
    scale = tl.where(largest == 0.0, 1.0, largest / limit) + tl.sum(row * 0.0, axis=1)
    narrow = tl.minimum(tl.maximum(row / scale[:, None], -limit), limit)
    if is_whole:
        narrow = (narrow + ROUNDER) - ROUNDER
    tl.store(out + token * WIDTH + columns, narrow.to(out.dtype.element_ty), mask=inside)
    num_groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    tl.store(scales + token * num_groups + groups, scale, mask=groups < num_groups)


@triton.jit
def _gather(x, order, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A program copies BLOCK columns of one token."""
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    taken = tl.load(order + columns, mask=inside, other=0)
    tl.store(out + token * WIDTH + columns, tl.load(x + token * WIDTH + taken, mask=inside), mask=inside)


@cache
def narrow_variant(dtype: torch.dtype, narrow: torch.dtype, width: int, group: int) -> KernelVariant:
    """The variant of ``narrow_inputs`` for rows of ``width`` columns, ``group`` of which share a scale; 0: all."""
    group = min(group or width, width)
    block, groups = triton.next_power_of_2(group), triton.next_power_of_2(triton.cdiv(width, group))
    return KernelVariant(
        _narrow,
        {"x": dtype, "out": narrow, "scales": torch.float32},
        {"WIDTH": width, "GROUP": group, "BLOCK": block, "GROUPS": groups},
        num_warps=num_warps(block * groups),
    )


@cache
def gather_variant(dtype: torch.dtype, width: int) -> KernelVariant:
    """The variant of ``gather_inputs`` for rows of ``width`` columns."""
    block = min(triton.next_power_of_2(width), BLOCK_GATHERED)
    return KernelVariant(
        _gather,
        {"x": dtype, "order": torch.int32, "out": dtype},
        {"WIDTH": width, "BLOCK": block},
        num_warps=num_warps(block),
    )


def narrow_inputs(x: Tensor, out: Tensor, scales: Tensor, group: int = 0) -> None:
    """Quantises x to ``out``, so that x is approximately out * scale. The largest magnitude in each ``group`` columns
    of a row (0: in the row) becomes the largest of the dtype of ``out``, int8 (127) or float8_e4m3fn.

    ``x`` and ``out`` are (T, K), ``scales`` is (T, groups) fp32, or (T,) without groups.
    """
    tokens, width = x.shape
    check(x, (tokens, width), x.dtype)
    check(out, (tokens, width), out.dtype)
    check(scales, (tokens, triton.cdiv(width, group)) if group else (tokens,), torch.float32)
    narrow_variant(x.dtype, out.dtype, width, group).launch((tokens,), x, out, scales)


def gather_inputs(x: Tensor, order: Tensor, out: Tensor) -> None:
    """out[t, c] = x[t, order[c]], where ``x`` and ``out`` are (T, K) of the same dtype and ``order`` is (K,) int32."""
    tokens, width = x.shape
    check(x, (tokens, width), x.dtype)
    check(out, (tokens, width), x.dtype)
    check(order, (width,), torch.int32)
    variant = gather_variant(x.dtype, width)
    variant.launch((tokens, triton.cdiv(width, variant.constants["BLOCK"])), x, order, out)

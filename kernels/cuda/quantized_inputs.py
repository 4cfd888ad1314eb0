"""Makes of a product's inputs what its kernel reads: bytes with a scale of each token, or columns in another order."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.common import MAX_FP8, check, load_wide, num_warps
from penstock.kernels.cuda.variant import Variant

BLOCK_GATHERED = 2048
"""Columns of a program, at most."""
MAX_INT8 = tl.constexpr(127.0)
ROUNDER = tl.constexpr(1.5 * 2**23)
"""Added to a float32 and taken away again, it rounds to the nearest whole number, ties to even."""


@triton.jit
def _narrow(x, out, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A program narrows one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = load_wide(x + token * WIDTH + columns, inside)
    is_whole: tl.constexpr = out.dtype.element_ty == tl.int8
    limit: tl.constexpr = MAX_INT8 if is_whole else MAX_FP8
    largest = tl.max(tl.abs(row), axis=0)
    # What is no number, or infinite, makes none of the scale, and so of all that the token's products give.
    scale = tl.where(largest == 0.0, 1.0, largest / limit) + tl.sum(row * 0.0, axis=0)
    narrow = tl.minimum(tl.maximum(row / scale, -limit), limit)
    if is_whole:
        narrow = (narrow + ROUNDER) - ROUNDER
    tl.store(out + token * WIDTH + columns, narrow.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + token, scale)


@triton.jit
def _gather(x, order, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A program copies BLOCK columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    taken = tl.load(order + columns, mask=inside, other=0)
    tl.store(out + token * WIDTH + columns, tl.load(x + token * WIDTH + taken, mask=inside), mask=inside)


@cache
def narrow_variant(dtype: torch.dtype, narrow: torch.dtype, width: int) -> Variant:
    """The variant of ``narrow_inputs`` for rows so wide."""
    block = triton.next_power_of_2(width)
    return Variant(
        _narrow,
        {"x": dtype, "out": narrow, "scales": torch.float32},
        {"WIDTH": width, "BLOCK": block},
        num_warps=num_warps(block),
    )


@cache
def gather_variant(dtype: torch.dtype, width: int) -> Variant:
    """The variant of ``gather_inputs`` for rows so wide."""
    block = min(triton.next_power_of_2(width), BLOCK_GATHERED)
    return Variant(
        _gather,
        {"x": dtype, "order": torch.int32, "out": dtype},
        {"WIDTH": width, "BLOCK": block},
        num_warps=num_warps(block),
    )


def narrow_inputs(x: Tensor, out: Tensor, scales: Tensor) -> None:
    """x = out * scale, nearly: a row's largest magnitude becomes that of the dtype of ``out``, int8 (127) or
    float8_e4m3fn.

    ``x`` and ``out`` are (T, K), ``scales`` is (T,) fp32.
    """
    tokens, width = x.shape
    check(x, (tokens, width), x.dtype)
    check(out, (tokens, width), out.dtype)
    check(scales, (tokens,), torch.float32)
    narrow_variant(x.dtype, out.dtype, width).launch((tokens,), x, out, scales)


def gather_inputs(x: Tensor, order: Tensor, out: Tensor) -> None:
    """out[t, c] = x[t, order[c]], where ``x`` and ``out`` are (T, K) of one dtype and ``order`` is (K,) int32."""
    tokens, width = x.shape
    check(x, (tokens, width), x.dtype)
    check(out, (tokens, width), x.dtype)
    check(order, (width,), torch.int32)
    variant = gather_variant(x.dtype, width)
    variant.launch((tokens, triton.cdiv(width, variant.constants["BLOCK"])), x, order, out)

"""RMS norms, separate or fused with the preceding addition to the residual stream. A program normalises one token."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import await_inputs, check, load_wide, num_warps, rounded
from penstock.kernels.cuda.core.launch import KernelVariant


@triton.jit
def _normed(x, weight, columns, inside, WIDTH: tl.constexpr, EPS: tl.constexpr):
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + EPS)
    return x * scale * tl.load(weight + columns, mask=inside, other=0.0)


@triton.jit
def _rms_norm(
    x,
    weight,
    y,
    X_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = load_wide(x + token * X_STRIDE + columns, inside)
    normed = _normed(row, weight, columns, inside, WIDTH, EPS)
    tl.store(y + token * Y_STRIDE + columns, normed.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm(
    x, delta, y, weight, delta_weight, WIDTH: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = token * WIDTH + columns
    added = load_wide(delta + at, inside)
    if delta_weight is not None:
        added = rounded(_normed(added, delta_weight, columns, inside, WIDTH, EPS), x)
    # The norm reads the rounded sum, which is what the next layer reads.
    total = rounded(load_wide(x + at, inside) + added, x)
    tl.store(x + at, total.to(x.dtype.element_ty), mask=inside)
    if weight is not None:
        normed = _normed(total, weight, columns, inside, WIDTH, EPS)
        tl.store(y + at, normed.to(y.dtype.element_ty), mask=inside)


@cache
def rms_norm_variant(dtype: torch.dtype, width: int, x_stride: int, y_stride: int, eps: float) -> KernelVariant:
    """The variant of ``rms_norm`` for rows that are ``x_stride`` and ``y_stride`` elements apart."""
    block = triton.next_power_of_2(width)
    return KernelVariant(
        _rms_norm,
        {"x": dtype, "weight": torch.float32, "y": dtype},
        {"X_STRIDE": x_stride, "Y_STRIDE": y_stride, "WIDTH": width, "EPS": eps, "BLOCK": block},
        num_warps=num_warps(block),
    )


@cache
def add_rms_norm_variant(
    dtype: torch.dtype, width: int, eps: float, *, norms_delta: bool, norms_sum: bool
) -> KernelVariant:
    """The variant of ``add_rms_norm`` with a ``delta_weight``, with a ``weight``, or with both."""
    block = triton.next_power_of_2(width)
    return KernelVariant(
        _add_rms_norm,
        {
            "x": dtype,
            "delta": dtype,
            "y": dtype if norms_sum else None,
            "weight": torch.float32 if norms_sum else None,
            "delta_weight": torch.float32 if norms_delta else None,
        },
        {"WIDTH": width, "EPS": eps, "BLOCK": block},
        num_warps=num_warps(block),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    """y = x / sqrt(mean(x^2) + eps) * weight, over each row.

    ``x`` and ``y`` are (T, W) of the same dtype. They may be the same tensor, and slices of wider rows. ``weight`` is
    (W,) in fp32: the checkpoint's weight plus the model's offset.
    """
    tokens, width = x.shape
    check(weight, (width,), torch.float32)
    assert y.shape == x.shape, (y.shape, x.shape)
    assert x.stride(1) == y.stride(1) == 1, (x.stride(), y.stride())
    rms_norm_variant(x.dtype, width, x.stride(0), y.stride(0), eps).launch((tokens,), x, weight, y)


def add_rms_norm(
    x: Tensor,
    delta: Tensor,
    eps: float,
    *,
    weight: Tensor | None = None,
    y: Tensor | None = None,
    delta_weight: Tensor | None = None,
) -> None:
    """x += delta, in place; then y = norm(x) * weight, if ``weight`` and ``y`` are given.

    If ``delta_weight`` is given, the delta is normalised first: x += norm(delta) * delta_weight. The norm is that of
    ``rms_norm``. ``x``, ``delta`` and ``y`` are (T, W) of the same dtype, the weights (W,) in fp32; ``y`` may be
    ``delta``.
    """
    tokens, width = x.shape
    assert (weight is None) == (y is None)
    for matrix in (x, delta) if y is None else (x, delta, y):
        check(matrix, (tokens, width), x.dtype)
    for vector in (weight, delta_weight):
        if vector is not None:
            check(vector, (width,), torch.float32)
    variant = add_rms_norm_variant(
        x.dtype, width, eps, norms_delta=delta_weight is not None, norms_sum=weight is not None
    )
    variant.launch((tokens,), x, delta, y, weight, delta_weight)

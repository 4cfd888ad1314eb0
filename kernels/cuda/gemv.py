"""Products y = x W^T + bias of one token, which take as long as the weight takes to read. For gate and up together, the
activation is applied to the sums, which saves a kernel.

cuBLAS reads the smaller matrices of an 8B at 60 to 70 % of the speed of copies (H200), and a first version of this
kernel at 75 to 85 %. Since then programs have two rows instead of four, and a whole step takes 3 % less.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.activation import activated
from penstock.kernels.cuda.core.common import await_inputs, check
from penstock.kernels.cuda.core.launch import ALIGNMENT, KernelVariant, interpreted, is_aligned

BLOCK_K = 2048
"""The maximum number of columns that are read at a time."""
BLOCK_N = 2
"""Rows of the weight per program. The interpreter takes as long for a program of many rows as for one of a few."""
INTERPRETED_BLOCK_N = 128


@triton.jit
def weight_rows(index, num_outputs, HALVES: tl.constexpr):
    """The row of the weight for each index. With two HALVES, an output's rows of gate and up follow each other, so that
    their sums can be split. After the last output, its rows are read again."""
    return tl.minimum(index // HALVES, num_outputs - 1) + index % HALVES * num_outputs


@triton.jit(do_not_specialize=["num_outputs"], do_not_specialize_on_alignment=["num_outputs"])
def gemv_kernel(
    x,
    weight,
    bias,
    out,
    num_outputs,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N rows, or with an ACTIVATION half as many of the gate and as many of up."""
    await_inputs(PDL)
    halves: tl.constexpr = 1 if ACTIVATION is None else 2
    outputs = tl.program_id(0) * (BLOCK_N // halves) + tl.arange(0, BLOCK_N // halves)
    row = weight_rows(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), num_outputs, halves)
    k = tl.arange(0, BLOCK_K)
    rows = weight + row.to(tl.int64)[:, None] * COLUMNS
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for begin in tl.range(0, COLUMNS, BLOCK_K, num_stages=1):
        columns = begin + k
        if COLUMNS % BLOCK_K == 0:
            inputs = tl.load(x + columns)
            weights = tl.load(rows + columns[None, :])
        else:
            inputs = tl.load(x + columns, mask=columns < COLUMNS, other=0.0)
            weights = tl.load(rows + columns[None, :], mask=(columns < COLUMNS)[None, :], other=0.0)
        total += weights.to(tl.float32) * inputs.to(tl.float32)[None, :]
    y = tl.sum(total, axis=1)
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)
    if ACTIVATION is not None:
        gate, up = tl.split(tl.reshape(y, (BLOCK_N // 2, 2)))
        y = activated(gate, ACTIVATION) * up
    tl.store(out + outputs, y.to(out.dtype.element_ty), mask=outputs < num_outputs)


@cache
def gemv_variant(
    dtype: torch.dtype, columns: int, activation: str | None = None, *, is_biased: bool = False
) -> KernelVariant:
    """The variant for weights with that number of columns."""
    whole = next((block for block in (BLOCK_K, BLOCK_K // 2) if columns % block == 0), BLOCK_K // 2)
    return KernelVariant(
        gemv_kernel,
        {"x": dtype, "weight": dtype, "bias": dtype if is_biased else None, "out": dtype, "num_outputs": "i32"},
        {
            "COLUMNS": columns,
            "ACTIVATION": activation,
            "BLOCK_N": INTERPRETED_BLOCK_N if interpreted() else BLOCK_N,
            "BLOCK_K": min(whole, triton.next_power_of_2(columns)),
        },
    )


def has_aligned_rows(weight: Tensor) -> bool:
    """Whether the kernel can read a weight: every row starts at an aligned address."""
    return is_aligned(weight) and weight.shape[1] * weight.element_size() % ALIGNMENT == 0


def gemv(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, activation: str | None = None) -> None:
    """out = x W^T + bias, summed in fp32. With an activation, the weight's rows are those of the gate, then those of
    up, and out = activation(gate) * up; the activations are those of ``gated_activation``.

    ``x`` is (1, K), ``weight`` (N, K) and ``bias`` (N,). ``out`` is (1, N), or (1, N / 2) with an activation. All are
    of the same dtype.
    """
    rows, columns = weight.shape
    num_outputs = rows if activation is None else rows // 2
    check(x, (1, columns), weight.dtype)
    check(out, (1, num_outputs), weight.dtype)
    if bias is not None:
        check(bias, (rows,), weight.dtype)
    variant = gemv_variant(weight.dtype, columns, activation, is_biased=bias is not None)
    rows_per_program = variant.constants["BLOCK_N"]
    assert isinstance(rows_per_program, int)
    variant.launch((triton.cdiv(rows, rows_per_program),), x, weight, bias, out, num_outputs)

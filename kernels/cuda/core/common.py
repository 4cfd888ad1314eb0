"""Helpers that several kernels share."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_FP8 = tl.constexpr(448.0)
"""The largest value of float8_e4m3fn."""


def check(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Asserts a tensor's shape and dtype, and that it is contiguous."""
    assert tensor.shape == shape, (tuple(tensor.shape), shape)
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tensor.is_contiguous()


def num_warps(elements: int) -> int:
    """The number of warps for a program that holds ``elements`` elements at a time: 16 per thread, which is two loads
    for 16-bit elements."""
    return min(max(elements // 512, 1), 16)


def product_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype of a product's operands: the model's, or fp32 in the interpreter, which multiplies bf16 incorrectly."""
    if triton.knobs.runtime.interpret:
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Waits for the end of the kernel before, and lets the kernel after start. This is the first line of kernels whose
    programs start while the kernel before still runs (programmatic dependent launch)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def load_wide(pointers, mask):
    """Loads values as fp32; 0 where masked."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rounded(x, pointer):
    """An fp32 value rounded to the dtype that ``pointer`` points to."""
    return x.to(pointer.dtype.element_ty).to(tl.float32)


@triton.jit
def narrowed(x, scale, pointer):
    """``x / scale`` in the dtype that ``pointer`` points to, clamped to the range of fp8; without a scale, only
    converted. NaN stays NaN, so that a broken model does not look whole."""
    if scale is not None:
        x = tl.clamp(x / scale, -MAX_FP8, MAX_FP8, propagate_nan=tl.PropagateNan.ALL)
    return x.to(pointer.dtype.element_ty)


@triton.jit
def order_of(x):
    """Maps a float32, which must not be NaN, to an int32 of the same order; 0 and -0 map to the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The inverse of ``order_of``."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

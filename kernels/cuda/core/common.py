"""What several kernels share."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_FP8 = tl.constexpr(448.0)
"""The largest float8_e4m3fn."""


def check(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Asserts a tensor's shape and dtype, and that it is contiguous."""
    assert tensor.shape == shape, (tuple(tensor.shape), shape)
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tensor.is_contiguous()


def num_warps(elements: int) -> int:
    """For a program that holds so many elements at a time: 16 a thread, which for 16 bits each are two loads."""
    return min(max(elements // 512, 1), 16)


def product_dtype(dtype: torch.dtype) -> tl.dtype:
    """What is multiplied: values of the model's dtype; fp32 in the interpreter, which multiplies bf16 wrong."""
    if triton.knobs.runtime.interpret:
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


@triton.jit
def load_wide(pointers, mask):
    """In fp32; 0 where masked."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rounded(x, pointer):
    """Fp32 as it is once it went through the memory that a pointer points to."""
    return x.to(pointer.dtype.element_ty).to(tl.float32)


@triton.jit
def narrowed(x, scale, pointer):
    """``x / scale`` in the dtype that a pointer points to, kept within that of fp8; without a scale, ``x`` itself."""
    if scale is not None:
        x = tl.minimum(tl.maximum(x / scale, -MAX_FP8), MAX_FP8)
    return x.to(pointer.dtype.element_ty)


@triton.jit
def order_of(x):
    """int32 that rises with a float32, which is no NaN; 0 and -0 are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The float32 that ``order_of`` makes this of."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

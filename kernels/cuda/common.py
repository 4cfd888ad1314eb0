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

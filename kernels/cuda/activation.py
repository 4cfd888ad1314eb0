"""The gated activation after an MLP's fused gate and up product; one program computes ``BLOCK`` columns of one token.
The experts' fused product shares its functions."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import await_inputs, check, load_wide, num_warps
from penstock.kernels.cuda.core.launch import KernelVariant

BLOCK = 2048
"""The maximum number of columns per program."""


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation function of ``gated_activation``, in fp32. Experts without a gate may also have relu_squared."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "relu_squared":
        positive = tl.where(x < 0, 0.0, x)  # NaN stays
        return positive * positive
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # (1 + tanh(z)) / 2 is sigmoid(2 z), here with 2 sqrt(2 / pi).
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def clamped_gate(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """g sigmoid(alpha g) (u + 1), with g clamped to at most ``LIMIT`` and u to -LIMIT ... LIMIT."""
    gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate * tl.sigmoid(ALPHA * gate) * (up + 1)


@triton.jit
def _gated_activation(
    gate_up, out, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = load_wide(gate_up + token * 2 * WIDTH + columns, inside)
    up = load_wide(gate_up + token * 2 * WIDTH + WIDTH + columns, inside)
    made = activated(gate, ACTIVATION) * up
    tl.store(out + token * WIDTH + columns, made.to(out.dtype.element_ty), mask=inside)


@cache
def gated_activation_variant(dtype: torch.dtype, width: int, activation: str) -> KernelVariant:
    """The variant of ``gated_activation`` for a result with ``width`` columns."""
    block = min(BLOCK, triton.next_power_of_2(width))
    constants = {"WIDTH": width, "ACTIVATION": activation, "BLOCK": block}
    return KernelVariant(_gated_activation, {"gate_up": dtype, "out": dtype}, constants, num_warps=num_warps(block))


def gated_activation(gate_up: Tensor, activation: str, out: Tensor) -> None:
    """out = act(g) * u, where ``gate_up`` is (T, 2N) with g in the first N columns and u in the rest, and ``out`` is
    (T, N) of its dtype.

    ``activation`` is silu: g sigmoid(g); gelu: g Phi(g); or gelu_tanh: its approximation by tanh.
    """
    tokens, width = out.shape
    check(out, (tokens, width), gate_up.dtype)
    check(gate_up, (tokens, 2 * width), gate_up.dtype)
    variant = gated_activation_variant(gate_up.dtype, width, activation)
    variant.launch((tokens, triton.cdiv(width, variant.constants["BLOCK"])), gate_up, out)

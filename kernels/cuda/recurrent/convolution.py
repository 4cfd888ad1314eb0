"""The causal convolution of recurrent layers, whose state is its last inputs. A program computes some channels of one
row, in blocks of tokens."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import await_inputs, check, load_wide, num_warps, rounded
from penstock.kernels.cuda.core.launch import KernelVariant
from penstock.kernels.cuda.recurrent.rows import ROW_ARGUMENTS, RecurrentRows, check_states

BLOCK_TOKENS = 16
"""The tokens of a block, unless the convolution has more taps."""
BLOCK_CHANNELS = 128


@triton.jit
def _load_inputs(
    x, live, start, tokens, channels, wanted, COLUMNS: tl.constexpr, FIRST: tl.constexpr, FACTOR: tl.constexpr,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Loads the convolution's inputs at tokens of a row; those before its first token are in its state."""
    known = tokens[:, None] >= 0
    at = x + (start + tokens)[:, None] * COLUMNS + channels[None, :]
    value = load_wide(at + FIRST, wanted & known)
    if FACTOR is not None:
        value = rounded(value * load_wide(at + FACTOR, wanted & known), x)
    before = live + (tokens + (TAPS - 1))[:, None] * CHANNELS + channels[None, :]
    return tl.where(known, value, tl.load(before, mask=wanted & (tokens[:, None] < 0), other=0.0))


@triton.jit
def _convolution(
    x, weight, bias, inputs, slots, starts, counts, advancing, saves, y, COLUMNS: tl.constexpr, FIRST: tl.constexpr,
    FACTOR: tl.constexpr, AFTER: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    row = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = (channels < CHANNELS)[None, :]
    count = tl.load(counts + row)
    start = tl.load(starts + row).to(tl.int64)
    advanced = tl.load(advancing + row)
    live = inputs + tl.load(slots + row).to(tl.int64) * STRIDE
    for begin in range(0, count, BLOCK_T):
        tokens = begin + tl.arange(0, BLOCK_T)
        inside = (tokens < count)[:, None] & there
        if y is not None:
            total = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
            for tap in tl.static_range(TAPS):
                value = _load_inputs(
                    x, live, start, tokens + (tap - TAPS + 1), channels, inside, COLUMNS, FIRST, FACTOR, CHANNELS, TAPS
                )
                factor = tl.load(weight + channels * TAPS + tap, mask=channels < CHANNELS, other=0.0)
                total += value * factor[None, :]
            if bias is not None:
                total += tl.load(bias + channels, mask=channels < CHANNELS, other=0.0)[None, :]
            if AFTER is None:
                total *= tl.sigmoid(total)
            else:
                after = load_wide(x + (start + tokens)[:, None] * COLUMNS + AFTER + channels[None, :], inside)
                total = after * rounded(total, x)
            to = y + (start + tokens)[:, None] * CHANNELS + channels[None, :]
            tl.store(to, total.to(y.dtype.element_ty), mask=inside)
        # The states after some of the tokens: the last inputs.
        is_advancing = tokens < advanced
        save = tl.load(saves + start + tokens, mask=is_advancing, other=0)
        saved = inside & (save > 0)[:, None]
        last = inside & (tokens == advanced - 1)[:, None]
        copy = inputs + (save.to(tl.int64) - 1)[:, None] * STRIDE
        for place in tl.static_range(TAPS - 1):
            value = _load_inputs(
                x, live, start, tokens + (place - TAPS + 2), channels, saved | last, COLUMNS, FIRST, FACTOR, CHANNELS,
                TAPS,
            )  # fmt: skip
            # Other threads may still read the state that is replaced here, also those of the sums above.
            tl.debug_barrier()
            tl.store(copy + place * CHANNELS + channels[None, :], value, mask=saved)
            tl.store(tl.broadcast_to(live + place * CHANNELS + channels[None, :], (BLOCK_T, BLOCK_C)), value, mask=last)


@dataclass(frozen=True)
class ConvolutionShape:
    """The properties of a layer that ``convolve`` is compiled for."""

    dtype: torch.dtype
    columns: int
    """The columns of the inputs' linear."""
    channels: int
    taps: int
    first: int
    """The column of the first channel."""
    factor: int | None
    """The column of the first channel's factor; None: there are none."""
    after: int | None
    """The column of the first channel's factor of the result; None: the result is its silu, in fp32."""
    is_biased: bool
    stride: int
    """The numbers of a slot: from a layer's state to that in the next slot."""

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return torch.float32 if self.after is None else self.dtype

    def block_tokens(self, longest: int) -> int:
        """The tokens of a block, for rows of at most ``longest``."""
        # No block after the first may need what the state was, since the first may have replaced it.
        return 1 if longest == 1 else max(BLOCK_TOKENS, triton.next_power_of_2(self.taps))


@cache
def convolution_variant(shape: ConvolutionShape, block_tokens: int, *, has_result: bool = True) -> KernelVariant:
    """The variant of ``convolve`` for blocks of that many tokens."""
    block_channels = min(BLOCK_CHANNELS, max(16, triton.next_power_of_2(shape.channels)))
    return KernelVariant(
        _convolution,
        {
            "x": shape.dtype,
            "weight": torch.float32,
            "bias": torch.float32 if shape.is_biased else None,
            "inputs": torch.float32,
            **ROW_ARGUMENTS,
            "y": shape.out_dtype if has_result else None,
        },
        {
            "COLUMNS": shape.columns, "FIRST": shape.first, "FACTOR": shape.factor, "AFTER": shape.after,
            "CHANNELS": shape.channels, "TAPS": shape.taps, "STRIDE": shape.stride, "BLOCK_T": block_tokens,
            "BLOCK_C": block_channels,
        },
        num_warps=min(num_warps(block_tokens * block_channels), 4),
    )  # fmt: skip


def convolve(
    shape: ConvolutionShape,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    rows: RecurrentRows,
    y: Tensor | None,
    longest: int,
) -> None:
    """y[t, c] = f(bias[c] + sum_j weight[c, j] z[t + j, c]), where z is the row's last inputs followed by those of its
    tokens; and advances the states. No row has over ``longest`` tokens.

    ``x`` is (T, columns): a token's input is the part at column ``first``, in fp32, or the product of that and the part
    at column ``factor``, rounded to the dtype. f is silu, or rounds to the dtype and multiplies by the part at column
    ``after``. ``weight`` is (channels, taps) and ``bias`` (channels,), in fp32. ``inputs`` (slots, taps - 1, channels)
    fp32 has the last inputs of each slot. ``y`` is (T, channels) of ``out_dtype``; without it, only states change.
    """
    tokens, _ = x.shape
    num_rows = rows.check_sizes(tokens)
    check(x, (tokens, shape.columns), shape.dtype)
    check(weight, (shape.channels, shape.taps), torch.float32)
    check_states(inputs, shape.stride)
    assert inputs.shape[1:] == (shape.taps - 1, shape.channels), inputs.shape
    if y is not None:
        check(y, (tokens, shape.channels), shape.out_dtype)
    variant = convolution_variant(shape, shape.block_tokens(longest), has_result=y is not None)
    grid = (num_rows, triton.cdiv(shape.channels, variant.constants["BLOCK_C"]))
    variant.launch(grid, x, weight, bias, inputs, *rows, y)

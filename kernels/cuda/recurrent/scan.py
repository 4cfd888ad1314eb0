"""The scans of recurrent layers with a matrix per head: the gated delta rule and Mamba-2. A program advances some
columns of one head's matrix by the tokens of one row, one after another, so a row's bits do not depend on how it is cut
into steps. Rows of many tokens may have chunks instead: see ``scan_chunks``."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import await_inputs, check
from penstock.kernels.cuda.core.launch import KernelVariant
from penstock.kernels.cuda.recurrent.rows import ROW_ARGUMENTS, RecurrentRows, RowChunks, check_states

BLOCK = 4096
"""Numbers of a matrix per program: 32 registers of each thread."""
MAX_KEY_SIZE = 1024
"""The most rows of a matrix, all of which a program has."""


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact to the last bits for small exp(x) too."""
    small = tl.exp(-tl.abs(x))
    total = 1.0 + small
    # What ``total`` lost by rounding is in the quotient.
    log = tl.where(total == 1.0, small, tl.log(total) * (small / tl.where(total == 1.0, 1.0, total - 1.0)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def _scan(
    mixed, x, decay_bias, rates, skips, matrices, slots, starts, counts, advancing, saves, firsts, y,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, QUERY: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    BETA: tl.constexpr, DECAY: tl.constexpr, HEADS: tl.constexpr, HEADS_PER_KEY: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, UNIT_EPS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    keys = tl.arange(0, BLOCK_K)
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    count = tl.load(counts + row)
    if firsts is not None:
        count = tl.where(tl.load(firsts + row) == tl.load(firsts + row + 1), count, 0)
    start = tl.load(starts + row).to(tl.int64)
    advanced = tl.load(advancing + row)
    of_head = matrices + head * (K * V) + keys[:, None] * V + columns[None, :]
    inside = (keys < K)[:, None] & (columns < V)[None, :]
    live = of_head + tl.load(slots + row).to(tl.int64) * STRIDE
    # Rows without tokens load nothing, nor do those with chunks.
    state = tl.load(live, mask=inside & (keys < tl.where(count > 0, K, 0))[:, None], other=0.0)
    rate = tl.load(rates + head)
    bias = tl.load(decay_bias + head)
    at_key = (head // HEADS_PER_KEY) * K + keys
    at_value = head * V + columns
    for number in range(count):
        token = start + number
        of_token = mixed + token * CHANNELS
        key = tl.load(of_token + KEY + at_key, mask=keys < K, other=0.0)
        value = tl.load(of_token + VALUE + at_value, mask=columns < V, other=0.0)
        step = softplus(tl.load(x + token * COLUMNS + DECAY + head).to(tl.float32) + bias)
        if UNIT_EPS is not None:
            key *= tl.rsqrt(tl.sum(key * key, axis=0) + UNIT_EPS)
            beta = tl.sigmoid(tl.load(x + token * COLUMNS + BETA + head).to(tl.float32))
            state *= tl.exp(rate * step)
            added = (value - tl.sum(state * key[:, None], axis=0)) * beta
        else:
            step = tl.maximum(step, LEAST)
            if MOST is not None:
                step = tl.minimum(step, MOST)
            state *= tl.exp(rate * step)
            added = value * step
        state += key[:, None] * added[None, :]
        if y is not None:
            query = tl.load(of_token + QUERY + at_key, mask=keys < K, other=0.0)
            if UNIT_EPS is not None:
                query *= tl.rsqrt(tl.sum(query * query, axis=0) + UNIT_EPS) * (K**-0.5)
            result = tl.sum(state * query[:, None], axis=0)
            if skips is not None:
                result += value * tl.load(skips + head)
            tl.store(y + token * (HEADS * V) + at_value, result, mask=columns < V)
        if number < advanced:
            save = tl.load(saves + token)
            if save > 0:
                tl.store(of_head + (save - 1).to(tl.int64) * STRIDE, state, mask=inside)
            if number == advanced - 1:
                tl.store(live, state, mask=inside)


@dataclass(frozen=True, kw_only=True)
class ScanShape:
    """The properties of a layer that ``scan`` is compiled for."""

    dtype: torch.dtype
    columns: int
    """The columns of the inputs' linear."""
    channels: int
    """The columns of the convolution's result."""
    query: int
    """The convolution's column of the first query; those of keys and values likewise."""
    key: int
    value: int
    beta: int | None
    """The linear's column of the first head's beta, in the gated delta rule; None: the scan is that of Mamba-2."""
    decay: int
    """The linear's column of the first head's step, from which its decay follows."""
    heads: int
    key_heads: int
    """Each serves as many successive heads."""
    key_size: int
    value_size: int
    unit_eps: float | None
    """Added to the squared length of queries and keys before they are divided by it; None with Mamba-2."""
    least_step: float
    """Limits of Mamba-2's steps."""
    most_step: float | None
    stride: int
    """The numbers of a slot: from a layer's matrices to those in the next slot."""

    @property
    def erases(self) -> bool:
        """Whether a token's key first removes from the matrix what is there: the gated delta rule."""
        return self.beta is not None


@cache
def scan_variant(shape: ScanShape, *, has_result: bool = True, has_chunks: bool = False) -> KernelVariant:
    """The variant of ``scan`` for a kind of layer."""
    block_k = triton.next_power_of_2(shape.key_size)
    block_v = min(max(BLOCK // block_k, 8), triton.next_power_of_2(shape.value_size))
    return KernelVariant(
        _scan,
        {
            "mixed": torch.float32,
            "x": shape.dtype,
            "decay_bias": torch.float32,
            "rates": torch.float32,
            "skips": None if shape.erases else torch.float32,
            "matrices": torch.float32,
            **ROW_ARGUMENTS,
            "firsts": torch.int32 if has_chunks else None,
            "y": torch.float32 if has_result else None,
        },
        {
            "CHANNELS": shape.channels, "COLUMNS": shape.columns, "QUERY": shape.query, "KEY": shape.key,
            "VALUE": shape.value, "BETA": shape.beta, "DECAY": shape.decay, "HEADS": shape.heads,
            "HEADS_PER_KEY": shape.heads // shape.key_heads, "K": shape.key_size, "V": shape.value_size,
            "UNIT_EPS": shape.unit_eps, "LEAST": shape.least_step, "MOST": shape.most_step, "STRIDE": shape.stride,
            "BLOCK_K": block_k, "BLOCK_V": block_v,
        },
        num_warps=4,
    )  # fmt: skip


def scan(
    shape: ScanShape,
    mixed: Tensor,
    x: Tensor,
    decay_bias: Tensor,
    rates: Tensor,
    skips: Tensor | None,
    matrices: Tensor,
    rows: RecurrentRows,
    y: Tensor | None,
    chunks: RowChunks | None = None,
) -> None:
    """Computes, token by token, with d = softplus(x + decay_bias) and a = exp(rates d) for each head:

    - the gated delta rule: S = a S; S = S + k beta (v - k S); y = q S / sqrt(K), where queries q and keys k are divided
      by their length, and beta follows from ``x`` by a sigmoid;
    - Mamba-2: S = a S + k d v; y = q S + skips v, where d is limited.

    ``mixed`` (T, channels) fp32 has the heads' queries, keys and values, and ``x`` (T, columns) what decay and beta
    follow from. ``decay_bias``, ``rates`` and ``skips`` are (heads,) in fp32, ``matrices`` (slots, heads, K, V) fp32
    has S. ``y`` is (T, heads * V) fp32; without it, only states change. Rows with ``chunks`` are left out.
    """
    tokens, _ = x.shape
    num_rows = rows.check_sizes(tokens)
    check(x, (tokens, shape.columns), shape.dtype)
    check(mixed, (tokens, shape.channels), torch.float32)
    for vector in (decay_bias, rates) if skips is None else (decay_bias, rates, skips):
        check(vector, (shape.heads,), torch.float32)
    check_states(matrices, shape.stride)
    assert matrices.shape[1:] == (shape.heads, shape.key_size, shape.value_size), matrices.shape
    if y is not None:
        check(y, (tokens, shape.heads * shape.value_size), torch.float32)
    if chunks is not None:
        chunks.check_sizes(num_rows)
    variant = scan_variant(shape, has_result=y is not None, has_chunks=chunks is not None)
    grid = (num_rows, shape.heads, triton.cdiv(shape.value_size, variant.constants["BLOCK_V"]))
    firsts = None if chunks is None else chunks.firsts
    variant.launch(grid, mixed, x, decay_bias, rates, skips, matrices, *rows, firsts, y)

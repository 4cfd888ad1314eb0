"""The products of LoRA adapters: shrink, x A^T, and expand, which adds the result times B^T to a linear's output.

Tokens with the same adapter are put into tiles of 16, so that each program reads one adapter's matrices. A token's sums
do not depend on the other tokens of its tile.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import await_inputs, check, num_warps, product_dtype
from penstock.kernels.cuda.core.launch import KernelVariant

TILE = 16
"""Tokens per tile."""
BLOCK_K = 128
BLOCK_R = 64
"""The maximum number of rows of A per program."""
MAX_BLOCK_N = 64
"""The maximum number of output columns per program."""


class LoraTiles(NamedTuple):
    """The tokens of a step that have an adapter."""

    tokens: Tensor
    """(tiles * 16,) int32: indices of tokens in the step; -1 where a tile has fewer."""
    slots: Tensor
    """(tiles,) int32: the slot of each tile's adapter, from 1 on; 0: the tile is empty."""


@triton.jit
def _shrink(
    x, a, tokens, slots, inner, K: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, PRODUCT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    tile = tl.program_id(0)
    slot = tl.load(slots + tile)
    if slot > 0:
        places = tile * TILE + tl.arange(0, TILE)
        token = tl.load(tokens + places).to(tl.int64)
        rows = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        first = a + (slot - 1).to(tl.int64) * ROWS * K
        total = tl.zeros((TILE, BLOCK_R), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            inside = columns < K
            inputs = tl.load(
                x + token[:, None] * K + columns[None, :], mask=(token >= 0)[:, None] & inside[None, :], other=0.0
            )
            weights = tl.load(
                first + rows[None, :] * K + columns[:, None], mask=(rows < ROWS)[None, :] & inside[:, None], other=0.0
            )
            total = tl.dot(inputs.to(PRODUCT), weights.to(PRODUCT), total, input_precision="ieee")
        at = inner + places[:, None] * ROWS + rows[None, :]
        tl.store(at, total.to(inner.dtype.element_ty), mask=(rows < ROWS)[None, :])


@triton.jit
def _expand(
    inner, b, tokens, slots, out, N: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr, END_0: tl.constexpr,
    END_1: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_RANK: tl.constexpr, PRODUCT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    tile = tl.program_id(0)
    slot = tl.load(slots + tile)
    if slot > 0:
        places = tile * TILE + tl.arange(0, TILE)
        token = tl.load(tokens + places).to(tl.int64)
        begin = tl.program_id(1) * BLOCK_N
        # All columns of a block belong to one part.
        part = (begin >= END_0).to(tl.int32) + (begin >= END_1).to(tl.int32)
        columns = begin + tl.arange(0, BLOCK_N)
        inside = columns < N
        first = b + (slot - 1).to(tl.int64) * N * RANK
        total = tl.zeros((TILE, BLOCK_N), dtype=tl.float32)
        for start in range(0, RANK, BLOCK_RANK):
            ranks = start + tl.arange(0, BLOCK_RANK)
            kept = ranks < RANK
            inputs = tl.load(
                inner + places[:, None] * (PARTS * RANK) + part * RANK + ranks[None, :], mask=kept[None, :], other=0.0
            )
            weights = tl.load(
                first + columns[None, :] * RANK + ranks[:, None], mask=inside[None, :] & kept[:, None], other=0.0
            )
            total = tl.dot(inputs.to(PRODUCT), weights.to(PRODUCT), total, input_precision="ieee")
        at = out + token[:, None] * N + columns[None, :]
        mask = (token >= 0)[:, None] & inside[None, :]
        before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, (before + total).to(out.dtype.element_ty), mask=mask)


@cache
def lora_shrink_variant(dtype: torch.dtype, columns: int, rows: int) -> KernelVariant:
    """The variant of shrink for inputs with ``columns`` columns and ``rows`` rows of A in all parts together."""
    block_r = min(BLOCK_R, max(16, triton.next_power_of_2(rows)))
    types = {"x": dtype, "a": dtype, "tokens": torch.int32, "slots": torch.int32, "inner": dtype}
    constants = {
        "K": columns, "ROWS": rows, "TILE": TILE, "BLOCK_R": block_r, "BLOCK_K": BLOCK_K,
        "PRODUCT": product_dtype(dtype),
    }  # fmt: skip
    return KernelVariant(_shrink, types, constants, num_warps=4)


@cache
def lora_expand_variant(dtype: torch.dtype, ends: tuple[int, ...], rank: int) -> KernelVariant:
    """The variant of expand for an output whose parts end at these columns, and this rank of each part."""
    block_n = _block_n(ends)
    block_rank = min(BLOCK_R, max(16, triton.next_power_of_2(rank)))
    types = {"inner": dtype, "b": dtype, "tokens": torch.int32, "slots": torch.int32, "out": dtype}
    constants = {
        "N": ends[-1], "RANK": rank, "PARTS": len(ends), "END_0": ends[0], "END_1": ends[min(1, len(ends) - 1)],
        "TILE": TILE, "BLOCK_N": block_n, "BLOCK_RANK": block_rank, "PRODUCT": product_dtype(dtype),
    }  # fmt: skip
    return KernelVariant(_expand, types, constants, num_warps=num_warps(TILE * block_n * 2))


def _block_n(ends: tuple[int, ...]) -> int:
    """Returns the largest block of columns that divides every part, so that none is in two parts."""
    block = MAX_BLOCK_N
    while any(end % block for end in ends[:-1]):
        block //= 2
    assert block >= 16, "the parts of a linear have multiples of 16 columns, or there is one part"
    return block


def add_lora(x: Tensor, a: Tensor, b: Tensor, ends: tuple[int, ...], tiles: LoraTiles, out: Tensor) -> None:
    """out[t] += B A x[t] for the tokens of the tiles, in fp32 except for A x, which is rounded.

    ``x`` is (T, K) and ``out`` (T, N), of one dtype. The linear has up to three parts side by side, which end at the
    columns ``ends``; ``a`` is (slots, parts * rank, K), and ``b`` (slots, N, rank) has each part's rows.
    """
    (tokens, columns), (num_slots, rows, _), rank = x.shape, a.shape, b.shape[2]
    assert 1 <= len(ends) <= 3, ends
    check(x, (tokens, columns), a.dtype)
    check(a, (num_slots, len(ends) * rank, columns), a.dtype)
    check(b, (num_slots, ends[-1], rank), a.dtype)
    check(out, (tokens, ends[-1]), a.dtype)
    num_tiles = len(tiles.slots)
    check(tiles.tokens, (num_tiles * TILE,), torch.int32)
    inner = x.new_empty(num_tiles * TILE, rows)
    shrink = lora_shrink_variant(x.dtype, columns, rows)
    shrink.launch((num_tiles, triton.cdiv(rows, shrink.constants["BLOCK_R"])), x, a, tiles.tokens, tiles.slots, inner)
    expand = lora_expand_variant(x.dtype, ends, rank)
    expand.launch(
        (num_tiles, triton.cdiv(ends[-1], expand.constants["BLOCK_N"])), inner, b, tiles.tokens, tiles.slots, out
    )

"""Attention of sequences with many queries each (prefill), which is bound by matrix products.

A program takes a tile of BLOCK_M rows, all heads of a group for some queries of a sequence, and loops over the
positions that these see. It masks only at the edge of the window and at the diagonal. Blocks begin at multiples of
BLOCK_N in every chunk, so a query's result is bitwise the same in every chunk and batch.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.attention.common import (
    NUMBERS,
    AttentionShape,
    PagedKV,
    RaggedRows,
    attend,
    final_weight,
    find_sequence,
    load_queries,
    lowest_seen,
    query_offsets,
    score_factor,
    shared_arguments,
    shared_values,
)
from penstock.kernels.cuda.core.common import await_inputs
from penstock.kernels.cuda.core.launch import KernelVariant


@dataclass(frozen=True)
class PrefillTiles:
    """Sizes that fill Hopper's tensor cores and fit its shared memory and registers. With 3 stages a block is loaded
    while the previous one is computed; with 2, Triton waits for each load immediately."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@functools.cache
def prefill_tiles(shape: AttentionShape) -> PrefillTiles:
    """The sizes for a shape."""
    if shape.rotated_dim and shape.block_dim > 256 and shape.dtype == torch.float32:
        return PrefillTiles(16, 16, 4, 2)
    if shape.block_dim > 256:  # larger tiles spill registers
        return PrefillTiles(32, 16, 8, 2) if shape.dtype == torch.float32 else PrefillTiles(32, 32, 8, 3)
    if shape.dtype == torch.float32:
        # With (64, 16, 8, 3), Triton 3.6 generates a second product that reads past the end of shared memory.
        return PrefillTiles(64, 32, 8, 3) if shape.block_dim <= 128 else PrefillTiles(32, 32, 4, 2)
    if shape.block_dim > 128:
        return PrefillTiles(128 if shape.wide_products else 64, 32, 8, 3)
    is_plain = shape.window is None and shape.kv_dtype == shape.dtype and shape.head_dim == 128
    if shape.block_dim > 64 and not shape.wide_products:  # 64 positions spill registers on compute capability 12.0
        return PrefillTiles(128, 32, 8, 3)
    if shape.block_dim > 64 and not is_plain:
        return PrefillTiles(128, 64, 8, 3)
    return PrefillTiles(128, 128, 8, 3)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=NUMBERS)
def prefill_kernel(
    query,
    out,
    pages,
    key_scales,
    value_scales,
    sinks,
    tables,
    rows,
    query_starts,
    contexts,
    max_pages,
    num_sequences,
    tile_starts,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTATED_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program's first index is a KV head. Its second counts tiles backwards, since the last tile sees the most
    positions."""
    await_inputs(PDL)
    head = tl.program_id(0)
    unit = tl.load(tile_starts + num_sequences) - 1 - tl.program_id(1)
    if unit < 0:
        return
    sequence = find_sequence(tile_starts, num_sequences, unit)
    begin = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - begin
    context = tl.load(contexts + sequence)
    table = tables + tl.load(rows + sequence).to(tl.int64) * max_pages
    tile = unit - tl.load(tile_starts + sequence)

    dims = tl.arange(0, BLOCK_D)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    index, query_rows, live = query_offsets(begin, row, head, num_queries, NUM_KV_HEADS, GROUP)
    at = query_rows[:, None] * HEAD_DIM + dims[None, :]
    there = live[:, None] & (dims < HEAD_DIM)[None, :]
    heads = query + query_rows * (ROTATED_DIM + HEAD_DIM)
    queries = load_queries(heads + ROTATED_DIM, live, HEAD_DIM, BLOCK_D, PRODUCT)
    rotated = load_queries(heads, live, ROTATED_DIM, BLOCK_R, PRODUCT) if ROTATED_DIM else None
    query_positions = context - num_queries + index
    factor = score_factor(tl.load(key_scales + head), SCALE, CAP)

    # Positions from `lowest` to below `opened` are seen by some queries, to below `closed` by all, to below `end` by
    # some.
    first = context - num_queries + tile * BLOCK_M // GROUP
    last = tl.minimum(context - num_queries + (tile * BLOCK_M + BLOCK_M - 1) // GROUP, context - 1)
    lowest = lowest_seen(first, WINDOW)
    bottom = lowest // BLOCK_N * BLOCK_N
    end = last + 1
    opened = tl.minimum(tl.cdiv(lowest_seen(last, WINDOW), BLOCK_N) * BLOCK_N, tl.cdiv(end, BLOCK_N) * BLOCK_N)
    closed = tl.maximum((first + 1) // BLOCK_N * BLOCK_N, opened)

    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for phase in tl.static_range(0 if WINDOW is not None else 1, 3):
        maximum, total, mixed = attend(
            queries,
            rotated,
            query_positions,
            maximum,
            total,
            mixed,
            pages,
            table,
            head,
            factor,
            bottom if phase == 0 else opened if phase == 1 else closed,
            tl.minimum(opened, end) if phase == 0 else closed if phase == 1 else end,
            lowest,
            phase != 1,
            NUM_KV_HEADS,
            HEAD_DIM,
            ROTATED_DIM,
            CAP,
            WINDOW,
            BLOCK_N,
        )
    sink = tl.load(sinks + head * GROUP + query_rows % GROUP)
    result = mixed * (final_weight(maximum, total, sink) * tl.load(value_scales + head))[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=there)


@functools.cache
def prefill_variant(shape: AttentionShape) -> KernelVariant:
    """The variant of the prefill kernel for a layer of this shape."""
    tiles = prefill_tiles(shape)
    return KernelVariant(
        prefill_kernel,
        {**shared_arguments(shape), "tile_starts": torch.int32},
        {**shape.constants(), "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def prefill_attention(
    shape: AttentionShape, query: Tensor, kv: PagedKV, batch: RaggedRows, tile_starts: Tensor, shorter: int, out: Tensor
) -> None:
    """Computes the attention of the sequences that have tiles in ``tile_starts`` (B + 1,) int32, each with more than
    ``shorter`` queries.

    The other arguments are those of ``paged_attention``, which checks them.
    """
    num_tokens = query.shape[0]
    num_sequences = min(batch.num_sequences, num_tokens // (shorter + 1))
    max_tiles = num_tokens * shape.group // prefill_tiles(shape).block_m + num_sequences
    prefill_variant(shape).launch((shape.num_kv_heads, max_tiles), *shared_values(query, out, kv, batch), tile_starts)

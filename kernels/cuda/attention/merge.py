"""Merges the partial results that several programs of the decoding kernel computed of one part."""

import functools

import torch
import triton
import triton.language as tl

from penstock.kernels.cuda.attention.common import final_weight, find_sequence, query_offsets
from penstock.kernels.cuda.attention.plan import DecodeShape, extent
from penstock.kernels.cuda.core.common import await_inputs
from penstock.kernels.cuda.core.launch import KernelVariant


@triton.jit
def merge_rows(
    sinks,
    out,
    partials,
    partial_weights,
    begin,
    num_queries,
    part,
    first_row,
    program,
    num_pieces,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Merges the pieces of ROWS rows of a part's tile, from ``first_row`` on. The part begins in the share of
    ``program``. PIECES are read at a time, bypassing the L1 cache, which may not have what other programs stored."""
    of_tile = first_row + tl.arange(0, ROWS)
    head = part % NUM_KV_HEADS
    row = part // NUM_KV_HEADS * BLOCK_M + of_tile
    _, query_rows, live = query_offsets(begin, row, head, num_queries, NUM_KV_HEADS, GROUP)
    dims = tl.arange(0, BLOCK_D)
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for done in range(0, num_pieces, PIECES):
        index = done + tl.arange(0, PIECES)
        # the part begins at the end of one program's share and continues at the beginning of the next ones
        partial = 2 * (program + index) + (index == 0).to(tl.int32)
        line = partial.to(tl.int64)[:, None] * BLOCK_M + of_tile[None, :]
        there = (index < num_pieces)[:, None] & live[None, :]
        weight = tl.load(partial_weights + line, mask=there, other=float("-inf"), cache_modifier=".cg")
        at = line[:, :, None] * HEAD_DIM + dims[None, None, :]
        there = there[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        values = tl.load(partials + at, mask=there, other=0.0, cache_modifier=".cg")
        raised = tl.maximum(maximum, tl.max(weight, axis=0))
        base = tl.where(raised == float("-inf"), 0.0, raised)
        weight = tl.exp2(weight - base[None, :])
        kept = tl.exp2(maximum - base)
        total = total * kept + tl.sum(weight, axis=0)
        mixed = mixed * kept[:, None] + tl.sum(values * weight[:, :, None], axis=0)
        maximum = raised
    sink = tl.load(sinks + head * GROUP + row % GROUP)
    result = mixed * final_weight(maximum, total, sink)[:, None]
    at = query_rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=live[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["num_sequences"], do_not_specialize_on_alignment=["num_sequences"])
def merge_kernel(
    query_starts,
    contexts,
    unit_starts,
    sinks,
    out,
    partials,
    partial_weights,
    num_sequences,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merges the pieces of a part that decode_kernel stored. A program's second index is a row of the part's tile.

    Its first index is one of decode_kernel's programs. It merges the part that begins in that program's share and
    continues beyond it, if there is one.
    """
    await_inputs(PDL)
    program = tl.program_id(0)
    units = tl.load(unit_starts + num_sequences) * NUM_KV_HEADS
    share = tl.cdiv(units, tl.num_programs(0))
    if program * share >= units:
        return
    last = tl.minimum((program + 1) * share, units) - 1
    sequence = find_sequence(unit_starts, num_sequences, last // NUM_KV_HEADS)
    begin = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - begin
    _, part_units = extent(tl.load(contexts + sequence), num_queries, WINDOW, BLOCK_N)
    first_unit = tl.load(unit_starts + sequence) * NUM_KV_HEADS
    part = (last - first_unit) // part_units
    first_unit += part * part_units
    num_pieces = (first_unit + part_units - 1) // share - program + 1
    is_row = part // NUM_KV_HEADS * BLOCK_M + tl.program_id(1) < num_queries * GROUP
    if (first_unit < program * share) | (num_pieces <= 1) | (not is_row):
        return
    merge_rows(
        sinks,
        out,
        partials,
        partial_weights,
        begin,
        num_queries,
        part,
        tl.program_id(1),
        program,
        num_pieces,
        NUM_KV_HEADS,
        GROUP,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_M,
        1,
        32,
    )


@functools.cache
def merge_variant(shape: DecodeShape) -> KernelVariant:
    """The variant that merges the partial results of ``decode_variant`` of the same shape."""
    return KernelVariant(
        merge_kernel,
        {
            **dict.fromkeys(("query_starts", "contexts", "unit_starts"), torch.int32),
            "sinks": torch.float32,
            "out": shape.attention.dtype,
            **dict.fromkeys(("partials", "partial_weights"), torch.float32),
            "num_sequences": "i32",
        },
        shape.constants(),
        num_warps=4,
    )

"""Merges the partial results that several programs of the decoding kernel computed of one part."""

import functools

import torch
import triton
import triton.language as tl

from penstock.kernels.cuda.attention.common import final_weight, find_sequence
from penstock.kernels.cuda.attention.plan import DecodeShape, extent
from penstock.kernels.cuda.core.common import await_inputs
from penstock.kernels.cuda.core.launch import KernelVariant

BLOCK_JOINED = tl.constexpr(32)
"""Pieces that are read at a time."""


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
    if first_unit < program * share:
        return
    row = part // NUM_KV_HEADS * BLOCK_M + tl.program_id(1)
    if (num_pieces <= 1) | (row >= num_queries * GROUP):
        return

    head = part % NUM_KV_HEADS * GROUP + row % GROUP
    dims = tl.arange(0, BLOCK_D)
    maximum = float("-inf")
    total = 0.0
    mixed = tl.zeros((BLOCK_D,), tl.float32)
    for done in range(0, num_pieces, BLOCK_JOINED):
        index = done + tl.arange(0, BLOCK_JOINED)
        # the part begins at the end of one program's share and continues at the beginning of the next ones
        partial = 2 * (program + index) + (index == 0).to(tl.int32)
        line = partial.to(tl.int64) * BLOCK_M + tl.program_id(1)
        there = index < num_pieces
        weight = tl.load(partial_weights + line, mask=there, other=float("-inf"))
        at = line[:, None] * HEAD_DIM + dims[None, :]
        values = tl.load(partials + at, mask=there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        raised = tl.maximum(maximum, tl.max(weight, axis=0))
        base = tl.where(raised == float("-inf"), 0.0, raised)
        weight = tl.exp2(weight - base)
        kept = tl.exp2(maximum - base)
        total = total * kept + tl.sum(weight, axis=0)
        mixed = mixed * kept + tl.sum(values * weight[:, None], axis=0)
        maximum = raised
    result = mixed * final_weight(maximum, total, tl.load(sinks + head))
    at = ((begin + row // GROUP).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM + dims
    tl.store(out + at, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


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

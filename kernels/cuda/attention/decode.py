"""Attention of sequences with few queries each (decoding, verification of drafts, the next turn of a chat) on a fixed
number of programs.

Each program takes a contiguous share of all units (plan.py defines units and parts), and may begin and end within a
part. If several programs share a part, their partial results go to a workspace. The program that ends last merges them,
or a kernel does (merge.py).
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.attention.common import (
    NUMBERS,
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
from penstock.kernels.cuda.attention.merge import merge_rows, merge_variant
from penstock.kernels.cuda.attention.plan import DecodeShape, extent
from penstock.kernels.cuda.core.common import await_inputs
from penstock.kernels.cuda.core.launch import KernelVariant


@dataclass(frozen=True)
class DecodeWorkspace:
    """Partial results. The layers of a model share one workspace, one after another."""

    num_multiprocessors: int
    """The number of the GPU's multiprocessors."""
    num_programs: int
    """The number of programs that share the work: ``shape.tiles.programs`` per multiprocessor."""
    mixed: Tensor
    """(num_partials, block_m, D) fp32: the values weighted by some of a part's keys."""
    weights: Tensor
    """(num_partials, block_m) fp32: log2 of the sum of 2^score over those keys."""
    counters: Tensor
    """(num_programs,) int32: the number of stored pieces of the part that begins in a program's share and continues
    beyond it. 0 between steps. Used only if the last program of a part merges."""
    extended: "DecodeWorkspace | None"
    """The workspace of ``shape.extended``."""

    @classmethod
    def allocate(cls, shape: DecodeShape, num_multiprocessors: int, device: torch.device) -> "DecodeWorkspace":
        """Allocates room for any step: two partial results per program, since it may begin and end within a part."""
        num_programs = num_multiprocessors * shape.tiles.programs
        rows = (2 * num_programs, shape.tiles.block_m)
        return cls(
            num_multiprocessors,
            num_programs,
            torch.empty((*rows, shape.attention.head_dim), dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.zeros(num_programs, dtype=torch.int32, device=device),
            None if shape.extended is None else cls.allocate(shape.extended, num_multiprocessors, device),
        )

    def check(self, shape: DecodeShape) -> None:
        rows = (2 * self.num_programs, shape.tiles.block_m)
        assert self.mixed.shape == (*rows, shape.attention.head_dim)
        assert self.weights.shape == rows
        assert self.counters.shape == (self.num_programs,)
        for tensor in (self.mixed, self.weights, self.counters):
            assert tensor.is_contiguous()


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=NUMBERS)
def decode_kernel(
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
    unit_starts,
    partials,
    partial_weights,
    counters,
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
    MERGED_ROWS: tl.constexpr,
    MERGED_PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes a program's share of the units. Stores the result of each part that the program has all of, and partial
    results of the others. The last program of a part merges these, MERGED_ROWS rows of MERGED_PIECES at a time; with 0
    rows, the merging kernel does."""
    await_inputs(PDL)
    dims = tl.arange(0, BLOCK_D)
    units = tl.load(unit_starts + num_sequences) * NUM_KV_HEADS
    share = tl.cdiv(units, tl.num_programs(0))
    unit = tl.program_id(0) * share
    units = tl.minimum(units, unit + share)
    while unit < units:
        sequence = find_sequence(unit_starts, num_sequences, unit // NUM_KV_HEADS)
        begin = tl.load(query_starts + sequence)
        num_queries = tl.load(query_starts + sequence + 1) - begin
        context = tl.load(contexts + sequence)
        table = tables + tl.load(rows + sequence).to(tl.int64) * max_pages
        first, part_units = extent(context, num_queries, WINDOW, BLOCK_N)
        within = unit - tl.load(unit_starts + sequence) * NUM_KV_HEADS
        part = within // part_units
        offset = within % part_units
        taken = tl.minimum(part_units - offset, units - unit)
        head = part % NUM_KV_HEADS
        row = part // NUM_KV_HEADS * BLOCK_M + tl.arange(0, BLOCK_M)
        index, query_rows, live = query_offsets(begin, row, head, num_queries, NUM_KV_HEADS, GROUP)
        heads = query + query_rows * (ROTATED_DIM + HEAD_DIM)
        at = query_rows[:, None] * HEAD_DIM + dims[None, :]
        there = live[:, None] & (dims < HEAD_DIM)[None, :]
        maximum, total, mixed = attend(
            load_queries(heads + ROTATED_DIM, live, HEAD_DIM, BLOCK_D, PRODUCT),
            load_queries(heads, live, ROTATED_DIM, BLOCK_R, PRODUCT) if ROTATED_DIM else None,
            context - num_queries + index,
            tl.full((BLOCK_M,), float("-inf"), tl.float32),
            tl.zeros((BLOCK_M,), tl.float32),
            tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
            pages,
            table,
            head,
            score_factor(tl.load(key_scales + head), SCALE, CAP),
            (first + offset) * BLOCK_N,
            tl.minimum((first + offset + taken) * BLOCK_N, context),
            lowest_seen(context - num_queries, WINDOW),
            True,
            NUM_KV_HEADS,
            HEAD_DIM,
            ROTATED_DIM,
            CAP,
            WINDOW,
            BLOCK_N,
        )
        value_scale = tl.load(value_scales + head)
        if taken == part_units:
            sink = tl.load(sinks + head * GROUP + query_rows % GROUP)
            result = mixed * (final_weight(maximum, total, sink) * value_scale)[:, None]
            tl.store(out + at, result.to(out.dtype.element_ty), mask=there)
        else:
            partial = 2 * tl.program_id(0) + (offset == 0).to(tl.int32)
            lines = partial.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            # 0 and -inf for a query that saw nothing here
            total = tl.where(total > 0.0, total, 1.0)
            result = mixed * (value_scale / total)[:, None]
            tl.store(partials + lines[:, None] * HEAD_DIM + dims[None, :], result, mask=there)
            tl.store(partial_weights + lines, maximum + tl.log2(total), mask=live)
            if MERGED_ROWS:
                program = (unit - offset) // share  # in whose share the part begins
                num_pieces = (unit - offset + part_units - 1) // share - program + 1
                # All threads of the program have stored their results before one of them counts.
                tl.debug_barrier()
                if tl.atomic_add(counters + program, 1, sem="acq_rel") == num_pieces - 1:
                    num_rows = num_queries * GROUP - part // NUM_KV_HEADS * BLOCK_M
                    for first_row in range(0, tl.minimum(num_rows, BLOCK_M), MERGED_ROWS):
                        merge_rows(
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
                            NUM_KV_HEADS,
                            GROUP,
                            HEAD_DIM,
                            BLOCK_D,
                            BLOCK_M,
                            MERGED_ROWS,
                            MERGED_PIECES,
                        )
                    tl.store(counters + program, 0)
        unit += taken


def _merge_constants(shape: DecodeShape) -> dict[str, object]:
    """How the decoding kernel merges. Each thread holds 32 numbers at a time."""
    if not shape.is_merged_by_last:
        return {"MERGED_ROWS": 0, "MERGED_PIECES": 0}
    rows = min(int(triton.next_power_of_2(shape.max_rows)), 4)
    pieces = 1024 * shape.tiles.num_warps // (rows * shape.attention.block_dim)
    return {"MERGED_ROWS": rows, "MERGED_PIECES": pieces}


@functools.cache
def decode_variant(shape: DecodeShape) -> KernelVariant:
    """The variant of the decoding kernel for a layer of this shape."""
    return KernelVariant(
        decode_kernel,
        {
            **shared_arguments(shape.attention),
            "unit_starts": torch.int32,
            **dict.fromkeys(("partials", "partial_weights"), torch.float32),
            "counters": torch.int32,
        },
        {**shape.attention.constants(), **shape.constants(), **_merge_constants(shape)},
        num_warps=shape.tiles.num_warps,
        num_stages=shape.tiles.num_stages,
    )


def decode_attention(
    shape: DecodeShape,
    query: Tensor,
    kv: PagedKV,
    batch: RaggedRows,
    unit_starts: Tensor,
    workspace: DecodeWorkspace,
    out: Tensor,
) -> None:
    """Computes the attention of the sequences that have units in ``unit_starts`` (B + 1,) int32.

    The other arguments are those of ``paged_attention``, which checks them.
    """
    workspace.check(shape)
    decode_variant(shape).launch(
        (workspace.num_programs,),
        *shared_values(query, out, kv, batch),
        unit_starts,
        workspace.mixed,
        workspace.weights,
        workspace.counters,
    )
    if shape.is_merged_by_last:
        return
    merge_variant(shape).launch(
        (workspace.num_programs, min(shape.tiles.block_m, shape.max_rows)),
        batch.query_starts,
        batch.contexts,
        unit_starts,
        kv.sinks,
        out,
        workspace.mixed,
        workspace.weights,
        batch.num_sequences,
    )

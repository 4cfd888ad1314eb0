"""Divides a step's attention among programs, once per step and on the device, where the lengths are.

A sequence of few queries is *decoded*. This is bound by reading its keys and values, so the reads are divided evenly,
whatever the batch looks like. A sequence has one *part* for each KV head and each tile of BLOCK_M rows (queries times
heads of a group); all its parts loop over the same positions. A *unit*, the smallest piece of work, is a block of
BLOCK_N positions of a part.

A sequence of more queries is *prefilled*. This is bound by matrix products, so its tiles are divided. If a query's
result must be bitwise the same in every batch and chunk, all sequences are prefilled.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.attention.common import AttentionShape, RaggedRows, lowest_seen
from penstock.kernels.cuda.attention.prefill import prefill_tiles
from penstock.kernels.cuda.core.common import await_inputs
from penstock.kernels.cuda.core.launch import KernelVariant

BLOCK_PLANNED = tl.constexpr(128)
"""Sequences that are planned at a time."""
MAX_DECODED = 64
"""The maximum number of queries of a sequence that is decoded. With more, it is not bound by reading."""


@dataclass(frozen=True)
class DecodeTiles:
    """Sizes that keep loads in flight while a block is computed, and fit shared memory and registers."""

    block_m: int
    """Rows (queries times heads of a group) that are computed together."""
    block_n: int
    """Positions that are read together."""
    num_stages: int
    programs: int
    """Programs per multiprocessor."""


def decode_tiles(shape: AttentionShape, max_rows: int) -> DecodeTiles:
    """The sizes for a shape and at most ``max_rows`` rows per sequence and KV head."""
    wide = shape.block_dim > 128 or shape.dtype == torch.float32
    block_m = min(max(triton.next_power_of_2(max_rows), 16), 32 if wide else 64)
    if shape.block_dim > 256:  # larger tiles spill registers
        return DecodeTiles(16, 16, 2, 1) if shape.dtype == torch.float32 else DecodeTiles(16, 16, 3, 2)
    if wide:
        return DecodeTiles(block_m, 32, 3, 2)
    if shape.kv_dtype == torch.float8_e4m3fn:  # half the bytes, and more registers
        return DecodeTiles(block_m, 64, 4 if block_m < 64 else 3, 2)
    if block_m > 16:
        return DecodeTiles(block_m, 64, 3, 2)
    return DecodeTiles(block_m, 64 if shape.block_dim > 64 else 128, 3, 3)


@dataclass(frozen=True)
class DecodeShape:
    """How a layer's attention is compiled for a bucket of steps."""

    attention: AttentionShape
    max_queries: int
    """The maximum number of queries of a sequence that is decoded. 0: all sequences are prefilled, and a query's result
    is bitwise the same in every step."""

    def __post_init__(self) -> None:
        assert 0 <= self.max_queries <= MAX_DECODED

    @property
    def max_rows(self) -> int:
        """The maximum number of rows: queries times heads of a group."""
        return self.max_queries * self.attention.group

    @property
    def tiles(self) -> DecodeTiles:
        return decode_tiles(self.attention, self.max_rows)

    def constants(self) -> dict[str, object]:
        """The constants of the decoding and the merging kernel."""
        return {
            "NUM_KV_HEADS": self.attention.num_kv_heads,
            "GROUP": self.attention.group,
            "HEAD_DIM": self.attention.head_dim,
            "BLOCK_D": self.attention.block_dim,
            "WINDOW": self.attention.window_constant,
            "BLOCK_M": self.tiles.block_m,
            "BLOCK_N": self.tiles.block_n,
        }


@dataclass(frozen=True)
class WorkStarts:
    """The start of each sequence's work, in the order of sequences, for layers of one shape."""

    units: Tensor
    """(B + 1,) int32: units of decoding, per KV head."""
    tiles: Tensor
    """(B + 1,) int32: tiles of prefill."""

    @classmethod
    def allocate(cls, num_sequences: int, device: torch.device) -> "WorkStarts":
        units, tiles = torch.empty((2, num_sequences + 1), dtype=torch.int32, device=device)
        return cls(units, tiles.clone())

    def check(self, num_sequences: int) -> None:
        assert self.units.shape == self.tiles.shape == (num_sequences + 1,)


@triton.jit
def extent(context, num_queries, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks that each part of a sequence reads: the first one, and their number."""
    first = lowest_seen(context - num_queries, WINDOW) // BLOCK_N
    return first, tl.cdiv(context, BLOCK_N) - first


@triton.jit(do_not_specialize=["num_sequences"], do_not_specialize_on_alignment=["num_sequences"])
def plan_kernel(
    query_starts,
    contexts,
    unit_starts,
    tile_starts,
    num_sequences,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PREFILL_BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Runs as one program. A sequence of at most MAX_QUERIES queries has units; one with more has tiles."""
    await_inputs(PDL)
    units_before = 0
    tiles_before = 0
    tl.store(unit_starts, 0)
    tl.store(tile_starts, 0)
    for begin in range(0, num_sequences, BLOCK_PLANNED):
        at = begin + tl.arange(0, BLOCK_PLANNED)
        there = at < num_sequences
        start = tl.load(query_starts + at, mask=there, other=0)
        num_queries = tl.load(query_starts + at + 1, mask=there, other=0) - start
        context = tl.load(contexts + at, mask=there, other=0)
        _, units = extent(context, num_queries, WINDOW, BLOCK_N)
        units *= tl.cdiv(num_queries * GROUP, BLOCK_M)  # 0 without queries
        units = tl.where(num_queries <= MAX_QUERIES, units, 0)
        tiles = tl.where(num_queries > MAX_QUERIES, tl.cdiv(num_queries * GROUP, PREFILL_BLOCK_M), 0)
        tl.store(unit_starts + 1 + at, units_before + tl.cumsum(units, axis=0), mask=there)
        tl.store(tile_starts + 1 + at, tiles_before + tl.cumsum(tiles, axis=0), mask=there)
        units_before += tl.sum(units, axis=0)
        tiles_before += tl.sum(tiles, axis=0)


@functools.cache
def plan_variant(shape: DecodeShape) -> KernelVariant:
    """The variant for layers of a shape."""
    names = ("query_starts", "contexts", "unit_starts", "tile_starts")
    return KernelVariant(
        plan_kernel,
        {**dict.fromkeys(names, torch.int32), "num_sequences": "i32"},
        {
            "GROUP": shape.attention.group,
            "WINDOW": shape.attention.window_constant,
            "MAX_QUERIES": shape.max_queries,
            "BLOCK_M": shape.tiles.block_m,
            "BLOCK_N": shape.tiles.block_n,
            "PREFILL_BLOCK_M": prefill_tiles(shape.attention).block_m,
        },
        num_warps=4,
    )


def plan_attention(shape: DecodeShape, batch: RaggedRows, starts: WorkStarts) -> None:
    """Divides a step's work and writes ``starts``. Called once per step for all layers of the same shape."""
    starts.check(batch.num_sequences)
    plan_variant(shape).launch(
        (1,), batch.query_starts, batch.contexts, starts.units, starts.tiles, batch.num_sequences
    )

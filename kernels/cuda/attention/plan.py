"""Divides a step's attention among programs, once per step and on the device, where the lengths are.

A sequence of few queries is *decoded*. This is bound by reading its keys and values, so the reads are divided evenly,
whatever the batch looks like. A sequence has one *part* for each KV head and each tile of BLOCK_M rows (queries times
heads of a group); all its parts loop over the same positions. A *unit*, the smallest piece of work, is a block of
BLOCK_N positions of a part.

A sequence of more queries is *prefilled*. This is bound by matrix products, so its tiles are divided. If a query's
result must be bitwise the same in every batch and chunk, all sequences are prefilled.

A sequence in between, such as the next turn of a chat, has few tiles. If its context is long, these would run on a few
multiprocessors long after all others have ended. So it is *extended*: by the kernel that decodes, with units of its own
and larger tiles.
"""

import functools
from dataclasses import dataclass, fields

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
PLAN_NUMBERS = ("num_sequences", "num_multiprocessors")
"""The arguments of the kernel that are numbers."""
MAX_DECODED = 64
"""The maximum number of queries of a sequence that is decoded. With more, it is not bound by reading."""
MAX_EXTENDED = 256
"""The maximum number of queries of a sequence that is extended. With more, it has tiles for most multiprocessors."""
MAX_MERGED_ROWS = 16
"""The maximum number of rows of a part that the last of its programs merges."""


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
    num_warps: int = 4


def decode_tiles(shape: AttentionShape, max_rows: int) -> DecodeTiles:
    """The sizes for a shape and at most ``max_rows`` rows per sequence and KV head."""
    wide = shape.block_dim > 128 or shape.dtype == torch.float32
    block_m = min(max(triton.next_power_of_2(max_rows), 16), 32 if wide else 64)
    if shape.rotated_dim and shape.block_dim > 256 and block_m > 16 and shape.dtype != torch.float32:
        # All heads read the same latents, so more of them are computed together. 64 rows spill registers.
        return DecodeTiles(32, 32, 3, 1, num_warps=8)
    if shape.block_dim > 256:  # larger tiles spill registers
        return DecodeTiles(16, 16, 2, 1) if shape.dtype == torch.float32 else DecodeTiles(16, 16, 3, 2)
    if wide:
        return DecodeTiles(block_m, 32, 3, 2)
    if block_m == 64 and shape.block_dim > 64 and not shape.wide_products:
        # Most of these GPUs have shared memory for only one program, and with 4 warps it spills registers.
        return DecodeTiles(64, 64, 3, 1, num_warps=8)
    if block_m > 16:
        return DecodeTiles(block_m, 64, 3, 2)
    if shape.kv_dtype == torch.float8_e4m3fn:  # half the bytes, and more registers
        return DecodeTiles(block_m, 128, 3, 2)
    return DecodeTiles(block_m, 128, 2, 2) if shape.block_dim > 64 else DecodeTiles(block_m, 128, 3, 3)


def extended_tiles(shape: AttentionShape) -> DecodeTiles:
    """The sizes for sequences that are extended."""
    if shape.block_dim > 128 or shape.dtype == torch.float32:
        return decode_tiles(shape, MAX_EXTENDED)
    # Without wide products, 64 positions of large heads spill registers.
    return DecodeTiles(128, 64 if shape.wide_products or shape.block_dim <= 64 else 32, 3, 1, num_warps=8)


@dataclass(frozen=True)
class DecodeShape:
    """How a layer's attention is compiled for a bucket of steps."""

    attention: AttentionShape
    max_queries: int
    """The maximum number of queries of a sequence that is decoded. 0: all sequences are prefilled, and a query's result
    is bitwise the same in every step."""
    is_extended: bool = False
    """Whether this is the ``extended`` shape of another."""

    def __post_init__(self) -> None:
        assert 0 <= self.max_queries <= (MAX_EXTENDED if self.is_extended else MAX_DECODED)

    @property
    def extended(self) -> "DecodeShape | None":
        """How sequences of more queries, up to MAX_EXTENDED, are extended; None if they are not."""
        if self.is_extended or not self.max_queries:
            return None
        return DecodeShape(self.attention, MAX_EXTENDED, is_extended=True)

    @property
    def max_rows(self) -> int:
        """The maximum number of rows: queries times heads of a group."""
        return self.max_queries * self.attention.group

    @property
    def tiles(self) -> DecodeTiles:
        return extended_tiles(self.attention) if self.is_extended else decode_tiles(self.attention, self.max_rows)

    @property
    def is_merged_by_last(self) -> bool:
        """Whether the last program that computes a piece of a part merges them all. This saves a kernel. With many or
        long rows, it would take longer than a kernel whose programs share them. And merging takes registers, which
        three programs per multiprocessor do not have."""
        is_small = self.max_rows <= MAX_MERGED_ROWS and self.attention.block_dim <= 128
        return is_small and not self.is_extended and self.tiles.programs < 3

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
    """The start of each sequence's work, in the order of sequences, for layers of one shape. Each is (B + 1,) int32."""

    units: Tensor
    """Units of decoding, per KV head."""
    extended: Tensor
    """The same of sequences that are extended."""
    tiles: Tensor
    """Tiles of prefill."""

    @classmethod
    def allocate(cls, num_sequences: int, device: torch.device) -> "WorkStarts":
        return cls(*(torch.empty(num_sequences + 1, dtype=torch.int32, device=device) for _ in fields(cls)))

    def first(self, num_sequences: int) -> "WorkStarts":
        """The beginning, for a step of fewer sequences."""
        end = num_sequences + 1
        return WorkStarts(self.units[:end], self.extended[:end], self.tiles[:end])

    def check(self, num_sequences: int) -> None:
        assert self.units.shape == self.extended.shape == self.tiles.shape == (num_sequences + 1,)


@triton.jit
def extent(context, num_queries, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks that each part of a sequence reads: the first one, and their number."""
    first = lowest_seen(context - num_queries, WINDOW) // BLOCK_N
    return first, tl.cdiv(context, BLOCK_N) - first


@triton.jit
def _queries_and_context(query_starts, contexts, at, num_sequences):
    """The number of queries and the context of each sequence; 0 after the last one."""
    there = at < num_sequences
    start = tl.load(query_starts + at, mask=there, other=0)
    num_queries = tl.load(query_starts + at + 1, mask=there, other=0) - start
    return num_queries, tl.load(contexts + at, mask=there, other=0)


@triton.jit(do_not_specialize=PLAN_NUMBERS, do_not_specialize_on_alignment=PLAN_NUMBERS)
def plan_kernel(
    query_starts,
    contexts,
    unit_starts,
    extended_starts,
    tile_starts,
    num_sequences,
    num_multiprocessors,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    MAX_EXTENDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXTENDED_BLOCK_M: tl.constexpr,
    EXTENDED_BLOCK_N: tl.constexpr,
    PREFILL_BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Runs as one program. A sequence of at most MAX_QUERIES queries has units of decoding. One of at most MAX_EXTENDED
    has extended units if its tiles would take longer than 2/3 of what each multiprocessor has to do, since computing
    units takes about 1.3 times as long. All others have tiles."""
    await_inputs(PDL)
    work = tl.zeros((), tl.int64)  # of all tiles, in blocks of positions
    if MAX_EXTENDED > MAX_QUERIES:
        for begin in range(0, num_sequences, BLOCK_PLANNED):
            at = begin + tl.arange(0, BLOCK_PLANNED)
            num_queries, context = _queries_and_context(query_starts, contexts, at, num_sequences)
            _, blocks = extent(context, num_queries, WINDOW, EXTENDED_BLOCK_N)
            tiles = tl.where(num_queries > MAX_QUERIES, tl.cdiv(num_queries * GROUP, PREFILL_BLOCK_M), 0)
            work += tl.sum(tiles.to(tl.int64) * blocks, axis=0)
    share = work * NUM_KV_HEADS // num_multiprocessors
    units_before = 0
    extended_before = 0
    tiles_before = 0
    tl.store(unit_starts, 0)
    tl.store(extended_starts, 0)
    tl.store(tile_starts, 0)
    for begin in range(0, num_sequences, BLOCK_PLANNED):
        at = begin + tl.arange(0, BLOCK_PLANNED)
        there = at < num_sequences
        num_queries, context = _queries_and_context(query_starts, contexts, at, num_sequences)
        rows = num_queries * GROUP
        _, blocks = extent(context, num_queries, WINDOW, EXTENDED_BLOCK_N)
        is_decoded = num_queries <= MAX_QUERIES
        is_extended = (num_queries > MAX_QUERIES) & (num_queries <= MAX_EXTENDED) & (blocks * 2 > share * 3)
        extended = tl.where(is_extended, blocks * tl.cdiv(rows, EXTENDED_BLOCK_M), 0)
        _, blocks = extent(context, num_queries, WINDOW, BLOCK_N)
        units = tl.where(is_decoded, blocks * tl.cdiv(rows, BLOCK_M), 0)  # 0 without queries
        tiles = tl.where(is_decoded | is_extended, 0, tl.cdiv(rows, PREFILL_BLOCK_M))
        tl.store(unit_starts + 1 + at, units_before + tl.cumsum(units, axis=0), mask=there)
        tl.store(extended_starts + 1 + at, extended_before + tl.cumsum(extended, axis=0), mask=there)
        tl.store(tile_starts + 1 + at, tiles_before + tl.cumsum(tiles, axis=0), mask=there)
        units_before += tl.sum(units, axis=0)
        extended_before += tl.sum(extended, axis=0)
        tiles_before += tl.sum(tiles, axis=0)


@functools.cache
def plan_variant(shape: DecodeShape) -> KernelVariant:
    """The variant for layers of a shape."""
    names = ("query_starts", "contexts", "unit_starts", "extended_starts", "tile_starts")
    extended = shape.extended or shape
    return KernelVariant(
        plan_kernel,
        {**dict.fromkeys(names, torch.int32), **dict.fromkeys(PLAN_NUMBERS, "i32")},
        {
            "NUM_KV_HEADS": shape.attention.num_kv_heads,
            "GROUP": shape.attention.group,
            "WINDOW": shape.attention.window_constant,
            "MAX_QUERIES": shape.max_queries,
            "MAX_EXTENDED": extended.max_queries,
            "BLOCK_M": shape.tiles.block_m,
            "BLOCK_N": shape.tiles.block_n,
            "EXTENDED_BLOCK_M": extended.tiles.block_m,
            "EXTENDED_BLOCK_N": extended.tiles.block_n,
            "PREFILL_BLOCK_M": prefill_tiles(shape.attention).block_m,
        },
        num_warps=4,
    )


def plan_attention(shape: DecodeShape, batch: RaggedRows, starts: WorkStarts, num_multiprocessors: int) -> None:
    """Divides a step's work and writes ``starts``. Called once per step for all layers of the same shape."""
    starts.check(batch.num_sequences)
    plan_variant(shape).launch(
        (1,),
        batch.query_starts,
        batch.contexts,
        starts.units,
        starts.extended,
        starts.tiles,
        batch.num_sequences,
        num_multiprocessors,
    )

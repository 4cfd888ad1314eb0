"""Tile sizes of a product's programs, from tables. Nothing is tuned at run time."""

import math
from dataclasses import dataclass

import torch

from penstock.kernels.cuda.quantized.weights import BLOCK_COLUMNS, Codes, WeightLayout

MIN_PART_COLUMNS = 512
"""The minimum number of columns in a part. With fewer, its first loads take longer than all others."""
WANTED_PROGRAMS = 256
"""Programs that it takes to read weights at full memory bandwidth: nearly two on each of 132 multiprocessors."""
PART_ROWS = 64
"""Rows per program that ``num_parts`` assumes."""
PART_TOKENS = 256
"""Tokens that are multiplied at a time if their sums have parts. Bounds the workspace of partial sums."""
STEADY_PART_TOKENS = 512
"""The same in deterministic mode, in which the sums of many tokens have parts too."""


@dataclass(frozen=True)
class TileBucket:
    """A range of token counts whose products use the same tiles."""

    max_tokens: float
    block_t: int
    """Tokens per program."""
    has_parts: bool
    """Whether several programs share the columns if the weight has few rows."""


STEADY_BUCKETS = (TileBucket(16, 16, True), TileBucket(math.inf, 32, True))
"""Buckets of deterministic products. Tensor cores use instructions of one warp (``mma``), and parts depend only on the
weight, so the order of summation is the same however many tokens there are."""
FLOATS_BUCKETS = (TileBucket(math.inf, 64, True),)
"""Buckets of unquantised weights, which are multiplied here only in deterministic mode. The smallest tile for
``wgmma``: many tokens need its speed, and few tokens are bound by reading weights in any case."""
BUCKETS = (
    TileBucket(16, 16, True),
    TileBucket(32, 32, True),
    # From 64 tokens per program on, Triton uses instructions of four warps (``wgmma``), which are faster and may sum in
    # another order.
    TileBucket(64, 64, True),
    TileBucket(PART_TOKENS, 128, True),
    TileBucket(math.inf, 128, False),
)


@dataclass(frozen=True)
class GemmTiles:
    """The sizes of a program's work."""

    block_t: int
    """Tokens per program."""
    block_n: int
    """Rows of the weight per program."""
    parts: int
    """The number of programs that share the columns; each has some of their blocks."""
    num_warps: int
    num_stages: int
    """The number of blocks that are prefetched, plus one."""


def num_parts(layout: WeightLayout) -> int:
    """The number of programs that share the columns if there are few tokens. Depends only on the weight."""
    programs = -(-layout.rows // PART_ROWS)
    return max(min(WANTED_PROGRAMS // programs, layout.columns // MIN_PART_COLUMNS), 1)


def all_tiles(layout: WeightLayout, dtype: torch.dtype, max_tokens: int, *, deterministic: bool) -> list[GemmTiles]:
    """The tiles of products of up to ``max_tokens`` tokens of a dtype. The last ones are those for exactly
    ``max_tokens``."""
    buckets = _buckets(layout, dtype, deterministic)
    least = [0, *(bucket.max_tokens for bucket in buckets)]
    return [_tiles(layout, dtype, bucket) for bucket, below in zip(buckets, least, strict=False) if max_tokens > below]


def changes(layout: WeightLayout, dtype: torch.dtype, *, deterministic: bool) -> list[int]:
    """The numbers of tokens at which the last element of ``all_tiles`` changes."""
    return [int(bucket.max_tokens) + 1 for bucket in _buckets(layout, dtype, deterministic)[:-1]]


def _buckets(layout: WeightLayout, dtype: torch.dtype, deterministic: bool) -> tuple[TileBucket, ...]:
    if dtype == torch.float32:  # wgmma is not precise enough for it
        return STEADY_BUCKETS[-1:] if layout.codes.are_floats else STEADY_BUCKETS
    if layout.codes.are_floats:
        return FLOATS_BUCKETS
    return STEADY_BUCKETS if deterministic else BUCKETS


def _tiles(layout: WeightLayout, dtype: torch.dtype, bucket: TileBucket) -> GemmTiles:
    parts = num_parts(layout) if bucket.has_parts else 1
    if bucket.block_t == 128:
        # Sums of groups need twice the registers, for the block's sum and the total.
        rows = 64 if layout.group or layout.codes is Codes.INT4 else 128
        return GemmTiles(128, rows, parts, num_warps=8, num_stages=4 if layout.narrows_inputs else 3)
    if bucket.block_t == 64:
        # Two programs fit in the shared memory of a multiprocessor.
        return GemmTiles(64, 128, parts, num_warps=4, num_stages=4 if layout.codes.are_floats else 3)
    # The number of bytes in flight matters. Weights of four bits, and short blocks, have half as many per stage.
    short = layout.codes is Codes.INT4 or layout.block < BLOCK_COLUMNS
    if dtype == torch.float32:  # a product is three in tf32, with the registers of three
        return GemmTiles(bucket.block_t, 64, parts, num_warps=8, num_stages=3)
    return GemmTiles(bucket.block_t, 64, parts, num_warps=4, num_stages=6 if short else 4)

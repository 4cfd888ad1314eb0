"""Sizes of a product's programs, by tables. Nothing is tuned at run time."""

import math
from dataclasses import dataclass

import torch

from penstock.kernels.cuda.quantized.weights import BLOCK_COLUMNS, Codes, WeightLayout

MIN_PART_COLUMNS = 512
"""Fewer, and a part's first loads take longer than all its others."""
WANTED_PROGRAMS = 256
"""Nearly two on each of 132 multiprocessors: what it takes to read weights as fast as memory can."""
PART_ROWS = 64
"""Rows of a program, for ``num_parts``."""
PART_TOKENS = 256
"""Tokens that are multiplied at a time where their sums have parts, for which there must be room."""
STEADY_PART_TOKENS = 512
"""The same where results must not depend on the batch, so that sums of many tokens have parts too."""


@dataclass(frozen=True)
class TileBucket:
    """Products that are made by the same programs."""

    max_tokens: float
    block_t: int
    """Tokens of a program."""
    has_parts: bool
    """Whether programs share the columns, where the weight has few rows."""


STEADY_BUCKETS = (TileBucket(16, 16, True), TileBucket(math.inf, 32, True))
"""Tensor cores multiply by instructions of one warp (``mma``), and sum by parts that the weight alone decides: in the
same order, however many tokens there are."""
FLOATS_BUCKETS = (TileBucket(math.inf, 64, True),)
"""Of floats, which come here only where bits must not change: the smallest tile that ``wgmma`` takes, since many tokens
want its speed, and few ones are bound by reading weights all the same."""
BUCKETS = (
    TileBucket(16, 16, True),
    TileBucket(32, 32, True),
    # From 64 tokens of a program on, by those of four warps (``wgmma``), which are faster and may sum otherwise.
    TileBucket(64, 64, True),
    TileBucket(PART_TOKENS, 128, True),
    TileBucket(math.inf, 128, False),
)


@dataclass(frozen=True)
class GemmTiles:
    """What a program takes."""

    block_t: int
    """Tokens."""
    block_n: int
    """Rows of the weight."""
    parts: int
    """Programs that share the columns, each of which has some of their blocks."""
    num_warps: int
    num_stages: int
    """Blocks that are read ahead, and one."""


def num_parts(layout: WeightLayout) -> int:
    """Programs that share the columns where there are few tokens: as many as are wanted, for the weight alone."""
    programs = -(-layout.rows // PART_ROWS)
    return max(min(WANTED_PROGRAMS // programs, layout.columns // MIN_PART_COLUMNS), 1)


def all_tiles(layout: WeightLayout, dtype: torch.dtype, max_tokens: int, *, deterministic: bool) -> list[GemmTiles]:
    """Of products of up to ``max_tokens`` tokens of that dtype, the last ones those of just so many."""
    buckets = _buckets(layout, dtype, deterministic)
    least = [0, *(bucket.max_tokens for bucket in buckets)]
    return [_tiles(layout, dtype, bucket) for bucket, below in zip(buckets, least, strict=False) if max_tokens > below]


def changes(layout: WeightLayout, dtype: torch.dtype, *, deterministic: bool) -> list[int]:
    """Numbers of tokens from which on ``all_tiles`` ends with others."""
    return [int(bucket.max_tokens) + 1 for bucket in _buckets(layout, dtype, deterministic)[:-1]]


def _buckets(layout: WeightLayout, dtype: torch.dtype, deterministic: bool) -> tuple[TileBucket, ...]:
    if dtype == torch.float32:  # no wgmma of which is precise enough
        return STEADY_BUCKETS[-1:] if layout.codes.are_floats else STEADY_BUCKETS
    if layout.codes.are_floats:
        return FLOATS_BUCKETS
    return STEADY_BUCKETS if deterministic else BUCKETS


def _tiles(layout: WeightLayout, dtype: torch.dtype, bucket: TileBucket) -> GemmTiles:
    parts = num_parts(layout) if bucket.has_parts else 1
    if bucket.block_t == 128:
        # Sums of groups take twice the registers: a block's, and that of all.
        rows = 64 if layout.group or layout.codes is Codes.INT4 else 128
        return GemmTiles(128, rows, parts, num_warps=8, num_stages=4 if layout.narrows_inputs else 3)
    if bucket.block_t == 64:
        # Two programs fit the shared memory of a multiprocessor.
        return GemmTiles(64, 128, parts, num_warps=4, num_stages=4 if layout.codes.are_floats else 3)
    # What is under way matters, in bytes; half of them are weights of four bits, or of a short block.
    short = layout.codes is Codes.INT4 or layout.block < BLOCK_COLUMNS
    if dtype == torch.float32:  # each of its products takes three, and the registers of three
        return GemmTiles(bucket.block_t, 64, parts, num_warps=8, num_stages=3)
    return GemmTiles(bucket.block_t, 64, parts, num_warps=4, num_stages=6 if short else 4)

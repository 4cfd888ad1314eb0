"""Products y = x W^T + bias of a few tokens, in 16 bits. They take about as long as the weight takes to read. For gate
and up together, the activation is applied to the sums, which saves a kernel.

Its programs start while the kernel before still runs, which those of cuBLAS do not. For 8 to 64 tokens of an 8B
(H200), a whole step takes 3 to 7 % less time than with cuBLAS and a kernel for the activation.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.activation import activated
from penstock.kernels.cuda.core.common import await_inputs, check, product_dtype
from penstock.kernels.cuda.core.launch import KernelVariant
from penstock.kernels.cuda.gemv import weight_rows

MAX_TOKENS = 64
"""With more, cuBLAS is as fast."""
BUCKETS = (16, 32, MAX_TOKENS)
"""The numbers of tokens that programs are compiled for; the rest of a tile is empty."""
BLOCK_K = 128
MULTIPROCESSORS = 132
"""The number of Hopper's multiprocessors. On a GPU with another number, tiles are the same."""
MIN_PART_COLUMNS = 512
"""The minimum number of columns in a part. With fewer, its first loads take longer than all others."""


@dataclass(frozen=True)
class SkinnyTiles:
    """The sizes of a program's work."""

    block_t: int
    """Tokens."""
    block_n: int
    """Rows of the weight."""
    parts: int
    """The number of programs that share the columns of these rows."""
    num_warps: int
    num_stages: int
    """The number of blocks of columns that are loaded at a time, plus one."""


def skinny_tiles(rows: int, columns: int, num_tokens: int) -> SkinnyTiles:
    """The sizes for a weight and a number of tokens."""
    block_t = next(bucket for bucket in BUCKETS if num_tokens <= bucket)
    blocks = triton.cdiv(rows, 64)
    if blocks >= 2 * MULTIPROCESSORS:
        # Two programs on each, or one of twice the size, which reads the inputs half as often.
        return SkinnyTiles(block_t, 64, 1, 4, 4) if block_t < MAX_TOKENS else SkinnyTiles(block_t, 128, 1, 8, 4)
    # With 5 stages only one program fits.
    programs, num_stages = (2 * MULTIPROCESSORS, 4) if block_t == BUCKETS[0] else (MULTIPROCESSORS, 5)
    parts = 1
    if 2 * blocks <= MULTIPROCESSORS:
        parts = max(min(programs // blocks, columns // MIN_PART_COLUMNS), 1)
    return SkinnyTiles(block_t, 64, parts, 4, num_stages)


@dataclass(frozen=True)
class SkinnyWorkspace:
    """The workspace of products whose columns are shared. Products that run one after another may share one."""

    partials: Tensor
    """Flat, fp32: the sums of the parts."""
    counters: Tensor
    """(blocks of rows,) int32: the number of parts that are done; 0 between products."""

    @classmethod
    def allocate(cls, shapes: Iterable[tuple[int, int]], device: torch.device) -> "SkinnyWorkspace":
        """Allocates room for weights of these shapes."""
        num_partials = num_blocks = 0
        for rows, columns in shapes:
            for tiles in (skinny_tiles(rows, columns, bucket) for bucket in BUCKETS):
                blocks = triton.cdiv(rows, tiles.block_n)
                if tiles.parts > 1:
                    num_partials = max(num_partials, tiles.parts * blocks * tiles.block_n * tiles.block_t)
                    num_blocks = max(num_blocks, blocks)
        return cls(
            torch.empty(num_partials, dtype=torch.float32, device=device),
            torch.zeros(num_blocks, dtype=torch.int32, device=device),
        )


@triton.jit
def _store_outputs(
    total,
    bias,
    out,
    block,
    row,
    tokens,
    num_tokens,
    OUTPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Adds the bias, applies the activation, and stores the outputs of a block. ``total`` is (BLOCK_N, BLOCK_T) and has
    the ``row`` of the weight for each line."""
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    if ACTIVATION is None:
        y = total
        output = block * BLOCK_N + tl.arange(0, BLOCK_N)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(total, (BLOCK_N // 2, 2, BLOCK_T)), (0, 2, 1)))
        y = activated(gate, ACTIVATION) * up
        output = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    there = (tokens < num_tokens)[None, :] & (output < OUTPUTS)[:, None]
    tl.store(out + tokens[None, :] * OUTPUTS + output[:, None], y.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["num_tokens"])
def skinny_gemm_kernel(
    x,
    weight,
    bias,
    out,
    partials,
    counters,
    num_tokens,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRODUCT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program's first index is its block of rows, or with an ACTIVATION of half as many rows of the gate and as many
    of up. Its second index is its part of the columns. The last program of a block to end adds up the parts, always in
    the same order."""
    await_inputs(PDL)
    halves: tl.constexpr = 1 if ACTIVATION is None else 2
    outputs: tl.constexpr = ROWS // halves
    block = tl.program_id(0)
    part = tl.program_id(1)
    index = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = weight_rows(index, outputs, halves)
    rows = weight + row.to(tl.int64)[:, None] * COLUMNS
    tokens = tl.arange(0, BLOCK_T)
    live = (tokens < num_tokens)[None, :]
    k = tl.arange(0, BLOCK_K)
    num_blocks: tl.constexpr = (COLUMNS + BLOCK_K - 1) // BLOCK_K
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for step in range(part * num_blocks // PARTS, (part + 1) * num_blocks // PARTS):
        columns = step * BLOCK_K + k
        if COLUMNS % BLOCK_K == 0:
            weights = tl.load(rows + columns[None, :])
            inputs = tl.load(x + tokens[None, :] * COLUMNS + columns[:, None], mask=live, other=0.0)
        else:
            inside = columns < COLUMNS
            weights = tl.load(rows + columns[None, :], mask=inside[None, :], other=0.0)
            there = live & inside[:, None]
            inputs = tl.load(x + tokens[None, :] * COLUMNS + columns[:, None], mask=there, other=0.0)
        total = tl.dot(weights.to(PRODUCT), inputs.to(PRODUCT), total)
    if PARTS == 1:
        _store_outputs(total, bias, out, block, row, tokens, num_tokens, outputs, ACTIVATION, BLOCK_N, BLOCK_T)
    else:
        at = index[:, None] * BLOCK_T + tokens[None, :]
        part_size = tl.num_programs(0) * BLOCK_N * BLOCK_T
        tl.store(partials + part * part_size + at, total)
        # All threads of the program have stored their sums before one of them counts.
        tl.debug_barrier()
        if tl.atomic_add(counters + block, 1, sem="acq_rel") == PARTS - 1:
            total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for other in tl.static_range(PARTS):
                total += tl.load(partials + other * part_size + at, cache_modifier=".cg")
            _store_outputs(total, bias, out, block, row, tokens, num_tokens, outputs, ACTIVATION, BLOCK_N, BLOCK_T)
            tl.store(counters + block, 0)


@cache
def skinny_gemm_variant(
    dtype: torch.dtype,
    rows: int,
    columns: int,
    tiles: SkinnyTiles,
    activation: str | None = None,
    *,
    is_biased: bool = False,
) -> KernelVariant:
    """The variant for weights of that shape."""
    shares = tiles.parts > 1
    return KernelVariant(
        skinny_gemm_kernel,
        {
            "x": dtype,
            "weight": dtype,
            "bias": dtype if is_biased else None,
            "out": dtype,
            "partials": torch.float32 if shares else None,
            "counters": torch.int32 if shares else None,
            "num_tokens": "i32",
        },
        {
            "ROWS": rows,
            "COLUMNS": columns,
            "ACTIVATION": activation,
            "PRODUCT": product_dtype(dtype),
            "PARTS": tiles.parts,
            "BLOCK_T": tiles.block_t,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": BLOCK_K,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def skinny_gemm_variants(
    dtype: torch.dtype,
    rows: int,
    columns: int,
    max_tokens: int,
    activation: str | None = None,
    *,
    is_biased: bool = False,
) -> list[KernelVariant]:
    """All variants that ``skinny_gemm`` launches for a weight and 2 to ``max_tokens`` tokens."""
    buckets = (bucket for bucket, below in zip(BUCKETS, (1, *BUCKETS), strict=False) if max_tokens > below)
    tiles = (skinny_tiles(rows, columns, bucket) for bucket in buckets)
    return [skinny_gemm_variant(dtype, rows, columns, form, activation, is_biased=is_biased) for form in tiles]


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    room: SkinnyWorkspace,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """out = x W^T + bias, summed in fp32. With an activation, the weight's rows are those of the gate, then those of
    up, and out = activation(gate) * up; the activations are those of ``gated_activation``.

    ``x`` is (T, K) with at most ``MAX_TOKENS`` tokens, ``weight`` (N, K) and ``bias`` (N,). ``out`` is (T, N), or
    (T, N / 2) with an activation. All are bf16 or fp16. Rows of the weight start at aligned addresses. Which programs
    compute a product depends only on the weight and on the bucket of T, and so does the order of its sums.
    """
    (tokens, _), (rows, columns) = x.shape, weight.shape
    assert weight.dtype.itemsize == 2, weight.dtype
    assert tokens <= MAX_TOKENS, tokens
    check(x, (tokens, columns), weight.dtype)
    check(out, (tokens, rows if activation is None else rows // 2), weight.dtype)
    if bias is not None:
        check(bias, (rows,), weight.dtype)
    tiles = skinny_tiles(rows, columns, tokens)
    workspace: tuple[Tensor | None, Tensor | None] = (None, None)
    if tiles.parts > 1:
        blocks = triton.cdiv(rows, tiles.block_n)
        assert room.partials.numel() >= tiles.parts * blocks * tiles.block_n * tiles.block_t
        assert room.counters.numel() >= blocks
        workspace = (room.partials, room.counters)
    variant = skinny_gemm_variant(weight.dtype, rows, columns, tiles, activation, is_biased=bias is not None)
    variant.launch((triton.cdiv(rows, tiles.block_n), tiles.parts), x, weight, bias, out, *workspace, tokens)

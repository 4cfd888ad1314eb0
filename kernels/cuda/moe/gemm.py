"""The experts' two matrix products, for tiles of pairs that go to the same expert, and the sum of each token's results.

Rows of both matrices are read BLOCK_K columns at a time and in order, so a row's result depends on no other row.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from penstock.kernels.cuda.activation import activated, clamped_gate
from penstock.kernels.cuda.core.common import await_inputs, load_wide, num_warps, product_dtype
from penstock.kernels.cuda.core.launch import KernelVariant
from penstock.kernels.cuda.moe.routing import GROUPED
from penstock.kernels.cuda.moe.shapes import FP4_GROUP, ExpertsShape, ExpertsTiles, MoeTiles

TILES_TOGETHER = tl.constexpr(16)
"""Tiles that are multiplied with the same block of columns, one after another, before the next block. The weights that
an expert's tiles share, and the rows that a tile reads again, then come from cache."""
GROUP = tl.constexpr(FP4_GROUP)
BLOCK_SUMMED = 1024
"""The maximum number of columns of a sum per program."""


@triton.jit
def _place(made, COLUMN_BLOCKS: tl.constexpr):
    """This program's tile, of ``made`` tiles, and its block of columns. A tile number of ``made`` or more means that
    there is no work for the program."""
    program = tl.program_id(0)
    together: tl.constexpr = TILES_TOGETHER * COLUMN_BLOCKS
    first = program // together * TILES_TOGETHER
    tiles = tl.maximum(tl.minimum(made - first, TILES_TOGETHER), 1)
    return first + program % together % tiles, program % together // tiles


@triton.jit
def _multiplied(
    left,
    live,
    right,
    SIZE: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The products, in fp32, of the rows of SIZE elements at ``left`` (BLOCK_M,) that are ``live`` with the rows at
    ``right`` (BLOCK_N,)."""
    inner = tl.arange(0, BLOCK_K)
    left = left[:, None] + inner[None, :]
    right = right[:, None] + inner[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        if SIZE % BLOCK_K == 0:
            rows = tl.load(left + start, mask=live[:, None], other=0.0)
            columns = tl.load(right + start)
        else:
            there = (inner < SIZE - start)[None, :]
            rows = tl.load(left + start, mask=live[:, None] & there, other=0.0)
            columns = tl.load(right + start, mask=there, other=0.0)
        sums = tl.dot(rows.to(PRODUCT), tl.trans(columns.to(PRODUCT)), sums, input_precision="tf32x3")
    return sums


@triton.jit
def _fp4_values(codes, exponents, PRODUCT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """(BLOCK_N, BLOCK_K) in PRODUCT, exactly, from (BLOCK_N, BLOCK_K / 2) bytes and (BLOCK_N, BLOCK_K / 32) exponents.
    2^-127 becomes zero."""
    both = tl.reshape(tl.join(codes & 15, codes >> 4), (BLOCK_N, BLOCK_K)).to(tl.int32)
    # A hexadecimal digit for each magnitude, doubled: 0, 1, 2, 3, and then 4, 6, 8, 12.
    place = (both & 3) * 4
    doubled = tl.where((both & 4) != 0, 0xC864 >> place, 0x3210 >> place) & 15
    signed = tl.where((both & 8) != 0, -doubled, doubled).to(tl.float32)
    scales = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 0.5
    groups = tl.reshape(signed, (BLOCK_N, BLOCK_K // GROUP, GROUP)) * scales[:, :, None]
    return tl.reshape(groups, (BLOCK_N, BLOCK_K)).to(PRODUCT)


@triton.jit
def _multiplied_fp4(
    left,
    live,
    codes,
    exponents,
    SIZE: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``_multiplied`` with rows in MXFP4 at ``codes`` and ``exponents`` (BLOCK_N,)."""
    inner = tl.arange(0, BLOCK_K)
    pairs = tl.arange(0, BLOCK_K // 2)
    groups = tl.arange(0, BLOCK_K // GROUP)
    left = left[:, None] + inner[None, :]
    codes = codes[:, None] + pairs[None, :]
    exponents = exponents[:, None] + groups[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        if SIZE % BLOCK_K == 0:
            rows = tl.load(left + start, mask=live[:, None], other=0.0)
            packed = tl.load(codes + start // 2)
            powers = tl.load(exponents + start // GROUP)
        else:
            rest = SIZE - start
            rows = tl.load(left + start, mask=live[:, None] & (inner < rest)[None, :], other=0.0)
            packed = tl.load(codes + start // 2, mask=(pairs < rest // 2)[None, :], other=0)
            powers = tl.load(exponents + start // GROUP, mask=(groups < rest // GROUP)[None, :], other=0)
        columns = _fp4_values(packed, powers, PRODUCT, BLOCK_N, BLOCK_K)
        sums = tl.dot(rows.to(PRODUCT), tl.trans(columns), sums, input_precision="tf32x3")
    return sums


@triton.jit
def _multiplied_rows(
    left,
    live,
    weight,
    exponents,
    row,
    SIZE: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The products with the rows ``row`` (BLOCK_N,) of a weight of SIZE columns, in either form."""
    if exponents is None:
        made = _multiplied(left, live, weight + row * SIZE, SIZE, PRODUCT, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        codes = weight + row * (SIZE // 2)
        powers = exponents + row * (SIZE // GROUP)
        made = _multiplied_fp4(left, live, codes, powers, SIZE, PRODUCT, BLOCK_M, BLOCK_N, BLOCK_K)
    return made


@triton.jit
def gate_up_kernel(
    x,
    weight,
    exponents,
    bias,
    pair_weights,
    pairs,
    tiles,
    num_tiles,
    out,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N columns of the activations of a tile's pairs, from BLOCK_N columns each of gate and
    up, or of up if there is no gate. With ``pair_weights``, the inputs are multiplied by them."""
    await_inputs(PDL)
    made = tl.load(num_tiles)
    tile, block = _place(made, tl.cdiv(INNER, BLOCK_N))
    if (tile >= made) | (block * BLOCK_N >= INNER):
        return
    expert = tl.load(tiles + 3 * tile).to(tl.int64)
    at = tl.load(tiles + 3 * tile + 1) + tl.arange(0, BLOCK_M)
    live = at < tl.load(tiles + 3 * tile + 2)
    pair = tl.load(pairs + at, mask=live, other=0)
    token = pair // PER_TOKEN

    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        # Both alternate, so that the values of a column are in one thread. After the last column, it is read again.
        turn = tl.arange(0, 2 * BLOCK_N)
        row = expert * (2 * INNER) + turn % 2 * INNER + tl.minimum(block * BLOCK_N + turn // 2, INNER - 1)
    else:
        row = expert * INNER + tl.minimum(column, INNER - 1)
    rows: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    left = x + token.to(tl.int64) * HIDDEN
    made = _multiplied_rows(left, live, weight, exponents, row, HIDDEN, PRODUCT, BLOCK_M, rows, BLOCK_K)
    if pair_weights is not None:  # the product of the scaled input, in fp32
        made *= tl.load(pair_weights + pair, mask=live, other=0.0)[:, None]
    if bias is not None:
        made += tl.load(bias + row).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(made, (BLOCK_M, BLOCK_N, 2)))
        if ALPHA is not None:
            result = clamped_gate(gate, up, ALPHA, LIMIT)
        else:
            result = activated(gate, ACTIVATION) * up
    else:
        result = activated(made, ACTIVATION)
    target = out + at.to(tl.int64)[:, None] * INNER + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=live[:, None] & (column < INNER)[None, :])


@triton.jit
def down_kernel(
    x,
    weight,
    exponents,
    bias,
    pair_weights,
    pairs,
    tiles,
    num_tiles,
    out,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N columns of the results of a tile's pairs, weighted if there are ``pair_weights``."""
    await_inputs(PDL)
    made = tl.load(num_tiles)
    tile, block = _place(made, tl.cdiv(HIDDEN, BLOCK_N))
    if (tile >= made) | (block * BLOCK_N >= HIDDEN):
        return
    expert = tl.load(tiles + 3 * tile).to(tl.int64)
    at = tl.load(tiles + 3 * tile + 1) + tl.arange(0, BLOCK_M)
    live = at < tl.load(tiles + 3 * tile + 2)
    pair = tl.load(pairs + at, mask=live, other=0)

    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = expert * HIDDEN + tl.minimum(column, HIDDEN - 1)
    left = x + at.to(tl.int64) * INNER
    made = _multiplied_rows(left, live, weight, exponents, row, INNER, PRODUCT, BLOCK_M, BLOCK_N, BLOCK_K)
    if bias is not None:
        made += tl.load(bias + row).to(tl.float32)[None, :]
    if pair_weights is not None:
        made *= tl.load(pair_weights + pair, mask=live, other=0.0)[:, None]
    target = out + pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(target, made.to(out.dtype.element_ty), mask=live[:, None] & (column < HIDDEN)[None, :])


@triton.jit(do_not_specialize=["num_sequences"], do_not_specialize_on_alignment=["num_sequences"])
def sum_kernel(
    parts,
    places,
    pair_weights,
    query_starts,
    out,
    num_sequences,
    HIDDEN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK columns of a token's sum, in the order of its experts. The results of its pairs are
    adjacent and weighted; with ``places`` they are anywhere, and with ``pair_weights`` weighted here."""
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(query_starts + num_sequences):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + place
        row = pair if places is None else tl.load(places + pair).to(tl.int64)
        part = load_wide(parts + row * HIDDEN + columns, inside)
        if pair_weights is not None:
            part *= tl.load(pair_weights + pair)
        total += part
    tl.store(out + token * HIDDEN + columns, total.to(out.dtype.element_ty), mask=inside)


def _product_variant(
    kernel: object,
    shape: ExpertsShape,
    is_weighted: bool,
    constants: dict[str, object],
    block_m: int,
    tiles: MoeTiles,
) -> KernelVariant:
    """The variant of one of the two products. ``is_weighted``: it multiplies by the pairs' weights."""
    return KernelVariant(
        kernel,
        {
            "x": shape.dtype,
            "weight": torch.uint8 if shape.is_fp4 else shape.dtype,
            "exponents": torch.uint8 if shape.is_fp4 else None,
            "bias": shape.dtype if shape.mixture.biased else None,
            "pair_weights": torch.float32 if is_weighted else None,
            **dict.fromkeys(GROUPED, torch.int32),
            "out": shape.dtype,
        },
        {
            "HIDDEN": shape.hidden_size,
            "INNER": shape.intermediate_size,
            **constants,
            "PRODUCT": product_dtype(shape.dtype),
            "BLOCK_M": block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k * 2 // shape.dtype.itemsize,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


@cache
def gate_up_variant(shape: ExpertsShape, tiles: ExpertsTiles) -> KernelVariant:
    """The variant of the first product, gate and up, with the given tiles."""
    alpha, limit = shape.clamped_gate or (None, None)
    constants = {
        "PER_TOKEN": shape.mixture.per_token,
        "GATED": shape.gated,
        "ACTIVATION": shape.activation,
        "ALPHA": alpha,
        "LIMIT": limit,
    }
    return _product_variant(gate_up_kernel, shape, shape.mixture.scales_inputs, constants, tiles.block_m, tiles.gate_up)


@cache
def down_variant(shape: ExpertsShape, tiles: ExpertsTiles) -> KernelVariant:
    """The variant of the second product, down, with the given tiles."""
    return _product_variant(down_kernel, shape, not shape.mixture.scales_inputs, {}, tiles.block_m, tiles.down)


@cache
def sum_variant(dtype: torch.dtype, hidden_size: int, per_token: int, *, is_grouped: bool = False) -> KernelVariant:
    """The variant of the sum of a token's results. ``is_grouped``: these are in the order of experts, not weighted."""
    block = min(BLOCK_SUMMED, triton.next_power_of_2(hidden_size))
    return KernelVariant(
        sum_kernel,
        {
            "parts": dtype,
            "places": torch.int32 if is_grouped else None,
            "pair_weights": torch.float32 if is_grouped else None,
            "query_starts": torch.int32,
            "out": dtype,
            "num_sequences": "i32",
        },
        {"HIDDEN": hidden_size, "PER_TOKEN": per_token, "BLOCK": block},
        num_warps=num_warps(block),
    )

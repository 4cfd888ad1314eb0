"""The kernels of gemm.py. A program computes BLOCK_N outputs of BLOCK_T tokens, from a part of the columns. If there
are several parts, a second kernel adds them up, always in the same order."""

import triton
import triton.language as tl

from penstock.kernels.cuda.core.common import await_inputs
from penstock.kernels.cuda.quantized.unpack import unpacked, unpacked_int4

TURNS = tl.constexpr(8)
"""Blocks of tokens that are multiplied with a block of rows while it is in cache."""


@triton.jit
def _block_of_program(num_tokens, ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tokens and the rows of this program. TURNS blocks of tokens use each block of rows, one after another."""
    row_blocks: tl.constexpr = (ROWS + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    first = program // (TURNS * row_blocks) * TURNS
    turns = tl.minimum(tl.cdiv(num_tokens, BLOCK_T) - first, TURNS)
    within = program % (TURNS * row_blocks)
    tokens = (first + within % turns) * BLOCK_T + tl.arange(0, BLOCK_T)
    return tokens, within // turns * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def _load_inputs(pointers, live, columns, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Loads the inputs of tokens that are ``live``; 0 from COLUMNS on."""
    there = live[:, None] if EVEN else live[:, None] & (columns < COLUMNS)[None, :]
    return tl.load(pointers + columns[None, :], mask=there, other=0.0)


@triton.jit
def _sum_codes(
    x,
    codes,
    scales,
    input_scales,
    live,
    begin,
    end,
    COLUMNS: tl.constexpr,
    FILLED: tl.constexpr,
    GROUP: tl.constexpr,
    PRODUCT: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The sum of x * code over the blocks from ``begin`` up to ``end``, (BLOCK_T, BLOCK_N) fp32. FILLED: the last block
    of codes is whole. PRODUCT None: both operands are bytes and are multiplied directly. With groups, each group's sum
    is multiplied by its scales."""
    total = tl.zeros((x.shape[0], codes.shape[1]), SUM)
    k = tl.arange(0, BLOCK_K)
    for block in range(begin, end):
        columns = block * BLOCK_K + k
        inputs = _load_inputs(x, live, columns, COLUMNS, COLUMNS % BLOCK_K == 0)
        if FILLED:
            weights = tl.load(codes + columns[:, None])
        else:
            weights = tl.load(codes + columns[:, None], mask=(columns < COLUMNS)[:, None], other=0.0)
        if GROUP != 0:
            group = block * BLOCK_K // GROUP
            scale = tl.load(input_scales + group, mask=live, other=0.0)[:, None] * tl.load(scales + group)[None, :]
            total += scale * tl.dot(inputs, weights, out_dtype=SUM, max_num_imprecise_acc=BLOCK_K)
        elif PRODUCT is None:
            # Tensor cores sum fp8 products with few bits, so they sum no more than one block.
            total = tl.dot(inputs, weights, total, out_dtype=SUM, max_num_imprecise_acc=BLOCK_K)
        else:
            total = tl.dot(inputs.to(PRODUCT), unpacked(weights, PRODUCT), total, input_precision="tf32x3")
    return total.to(tl.float32)


@triton.jit
def _sum_int4(
    x,
    codes,
    scales,
    zeros,
    live,
    begin,
    end,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The sum of scale * sum of x * (code - zero) over the blocks from ``begin`` up to ``end``, (BLOCK_T, BLOCK_N)
    fp32."""
    total = tl.zeros((x.shape[0], codes.shape[1]), tl.float32)
    half: tl.constexpr = BLOCK_K // 2
    even: tl.constexpr = COLUMNS % BLOCK_K == 0
    k = tl.arange(0, half)
    for block in range(begin, end):
        columns = block * BLOCK_K + k
        low_inputs = _load_inputs(x, live, columns, COLUMNS, even)
        high_inputs = _load_inputs(x, live, columns + half, COLUMNS, even)
        # The zeros and scales of the next groups are adjacent, and stay in the L1 cache.
        group = 0 if GROUP == 0 else block * BLOCK_K // GROUP
        zero = tl.load(zeros + group)
        scale = tl.load(scales + group)
        low, high = unpacked_int4(tl.load(codes + (block * half + k)[:, None]), zero, PRODUCT)
        product = tl.dot(low_inputs.to(PRODUCT), low, input_precision="tf32x3")
        product = tl.dot(high_inputs.to(PRODUCT), high, product, input_precision="tf32x3")
        total += scale[None, :] * product
    return total


@triton.jit
def _finished(total, rows, inside, row_scales, input_scale, bias):
    """Finishes a sum: multiplies it by the scales of its row and its token, and adds the bias, where these exist."""
    if row_scales is not None:
        total *= tl.load(row_scales + rows, mask=inside, other=0.0) * input_scale
    if bias is not None:
        total += tl.load(bias + rows, mask=inside, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["num_tokens"])
def gemm_kernel(
    x,
    codes,
    scales,
    zeros,
    input_scales,
    bias,
    out,
    num_tokens,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    PRODUCT: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program's second index is its part. With several parts, ``out`` is (PARTS, T, N) fp32, and reduce_kernel
    finishes it."""
    await_inputs(PDL)
    tokens, rows = _block_of_program(num_tokens, ROWS, BLOCK_T, BLOCK_N)
    live = tokens < num_tokens
    tokens = tokens.to(tl.int64)
    read = rows % ROWS  # after the last row, any row: its outputs are not stored
    x += tokens[:, None] * COLUMNS
    codes += read.to(tl.int64)[None, :] * ROW_SIZE
    num_blocks: tl.constexpr = (COLUMNS + BLOCK_K - 1) // BLOCK_K
    part = tl.program_id(1)
    begin = part * num_blocks // PARTS
    end = (part + 1) * num_blocks // PARTS
    num_groups: tl.constexpr = 1 if GROUP == 0 else (COLUMNS + GROUP - 1) // GROUP
    of_rows = None if scales is None else scales + read * num_groups
    if zeros is None:
        of_tokens = None if input_scales is None else input_scales + tokens * num_groups
        filled: tl.constexpr = ROW_SIZE % BLOCK_K == 0
        total = _sum_codes(
            x, codes, of_rows, of_tokens, live, begin, end, COLUMNS, filled, GROUP, PRODUCT, SUM, BLOCK_K
        )
    else:
        zeros += read * num_groups
        total = _sum_int4(x, codes, of_rows, zeros, live, begin, end, COLUMNS, GROUP, PRODUCT, BLOCK_K)
    if PARTS == 1:
        row_scales = scales if zeros is None and GROUP == 0 else None
        input_scale = 1.0
        if input_scales is not None and GROUP == 0:
            input_scale = tl.load(input_scales + tokens, mask=live, other=0.0)[:, None]
        total = _finished(total, read[None, :], True, row_scales, input_scale, bias)
    else:
        out += part.to(tl.int64) * num_tokens * ROWS
    at = tokens[:, None] * ROWS + rows[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=live[:, None] & (rows < ROWS)[None, :])


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["num_tokens"])
def reduce_kernel(
    partials,
    scales,
    input_scales,
    bias,
    out,
    num_tokens,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program adds up the parts of BLOCK outputs of one token, first part first."""
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < ROWS
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(partials + (part * num_tokens + token) * ROWS + rows, mask=inside, other=0.0)
    input_scale = 1.0 if input_scales is None else tl.load(input_scales + token)
    total = _finished(total, rows, inside, scales, input_scale, bias)
    tl.store(out + token * ROWS + rows, total.to(out.dtype.element_ty), mask=inside)

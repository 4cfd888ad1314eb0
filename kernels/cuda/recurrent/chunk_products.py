"""The products within the chunks of rows, which depend on no state: the first part of the chunked scan, for all chunks
at once. See ``chunked_scan``."""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import await_inputs, check
from penstock.kernels.cuda.core.launch import KernelVariant, interpreted
from penstock.kernels.cuda.recurrent.rows import CHUNK, LEAST_CHUNKED, RowChunks
from penstock.kernels.cuda.recurrent.scan import ScanShape, softplus

MAX_CHUNKED_KEY_SIZE = 256
"""The most rows of a matrix that a chunk is multiplied with."""
NUM_FACTORS = 4
"""The factors of a token and head, after its rows of matrices: of what its query reads, of what its key writes, of the
state up to it, and of what its key erases."""
MAX_PROGRAM_HEADS = 8
"""The most heads of a program that computes products, which all have the same key and query."""
CHUNK_ARGUMENTS = dict.fromkeys(("firsts", "chunk_starts", "chunk_lengths"), torch.int32)
"""The arguments of kernels that get ``RowChunks``."""


@triton.jit
def _halves(x):
    """fp32 as a sum of two numbers in bf16. The first is rounded by integers: a slow unit does conversions to bf16 and
    back."""
    bits = x.to(tl.int32, bitcast=True) + 0x8000
    rest = x - (bits & -0x10000).to(tl.float32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), rest.to(tl.bfloat16)


@triton.jit
def multiply(x, y, total, PRECISION: tl.constexpr):
    """``total`` plus the product of two matrices in fp32; see ``precision``."""
    if PRECISION == "bf16x3":
        first, second = _halves(x)
        other_first, other_second = _halves(y)
        total = tl.dot(second, other_first, total)
        total = tl.dot(first, other_second, total)
        return tl.dot(first, other_first, total)
    else:
        return tl.dot(x, y, total, input_precision=PRECISION)


@triton.jit
def _inverse(lower, SIZE: tl.constexpr):
    """The inverse of I + ``lower``, which is (SIZE, SIZE) and 0 on its diagonal and above, row by row.

    A series of powers would not be as exact, if keys are alike.
    """
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    turned = tl.trans(lower)
    inverse = tl.where(row == column, 1.0, 0.0)
    for number in range(1, SIZE):
        factors = tl.sum(tl.where(column == number, turned, 0.0), axis=1)
        rest = tl.sum(inverse * factors[:, None], axis=0)
        inverse -= tl.where(row == number, rest[None, :], 0.0)
    return inverse


@triton.jit
def _multiply_keys(
    of_query, of_key, there, K: tl.constexpr, UNIT_EPS: tl.constexpr, LENGTH: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The products of a chunk's queries and of its keys with its keys, and the factors of queries and keys, with which
    they are scaled. Without UNIT_EPS, only the first is needed."""
    scores = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
    overlaps = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
    query_squares = tl.zeros((LENGTH,), dtype=tl.float32)
    key_squares = tl.zeros((LENGTH,), dtype=tl.float32)
    for at in range(0, K, BLOCK_K):
        keys = at + tl.arange(0, BLOCK_K)
        inside = there[:, None] & (keys < K)[None, :]
        key = tl.load(of_key + keys[None, :], mask=inside, other=0.0)
        query = tl.load(of_query + keys[None, :], mask=inside, other=0.0)
        scores = multiply(query, tl.trans(key), scores, PRECISION)
        if UNIT_EPS is not None:
            overlaps = multiply(key, tl.trans(key), overlaps, PRECISION)
            query_squares += tl.sum(query * query, axis=1)
            key_squares += tl.sum(key * key, axis=1)
    if UNIT_EPS is not None:
        query_squares = tl.rsqrt(query_squares + UNIT_EPS) * (K**-0.5)
        key_squares = tl.rsqrt(key_squares + UNIT_EPS)
        scores *= query_squares[:, None] * key_squares[None, :]
        overlaps *= key_squares[:, None] * key_squares[None, :]
    return scores, overlaps, query_squares, key_squares


@triton.jit(do_not_specialize=("num_rows",), do_not_specialize_on_alignment=("num_rows",))
def _chunk_products(
    mixed, x, decay_bias, rates, firsts, chunk_starts, chunk_lengths, num_rows, products, CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr, QUERY: tl.constexpr, KEY: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PER_KEY: tl.constexpr, K: tl.constexpr, UNIT_EPS: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, LENGTH: tl.constexpr, ROW: tl.constexpr, FACTORS: tl.constexpr, PROGRAM_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program's second index is some heads of one key. Its first is a chunk; with more chunks than programs, it goes
    on with others."""
    await_inputs(PDL)
    first_head = tl.program_id(1) * PROGRAM_HEADS
    first_key = (first_head // HEADS_PER_KEY) * K
    number = tl.arange(0, LENGTH)
    later = number[:, None] > number[None, :]
    seen = number[:, None] >= number[None, :]
    for chunk in range(tl.program_id(0), tl.load(firsts + num_rows), tl.num_programs(0)):
        begin = tl.load(chunk_starts + chunk).to(tl.int64)
        there = number < tl.load(chunk_lengths + chunk)
        of_key = (mixed + begin * CHANNELS + first_key) + number[:, None] * CHANNELS
        scores, overlaps, unit_query, unit_key = _multiply_keys(
            of_key + QUERY, of_key + KEY, there, K, UNIT_EPS, LENGTH, BLOCK_K, PRECISION
        )
        for place in range(PROGRAM_HEADS):
            head = first_head + place
            of_token = (x + begin * COLUMNS + head) + number * COLUMNS
            step = softplus(
                tl.load(of_token + DECAY, mask=there, other=0.0).to(tl.float32) + tl.load(decay_bias + head)
            )
            if UNIT_EPS is None:
                step = tl.maximum(step, LEAST)
                if MOST is not None:
                    step = tl.minimum(step, MOST)
            decay = tl.where(there, step * tl.load(rates + head), 0.0)
            of_later = tl.where(later, decay[:, None], 0.0)
            between = tl.where(seen, tl.exp(tl.cumsum(of_later, axis=0)), 0.0)
            kept = tl.exp(tl.cumsum(decay, axis=0))
            written = tl.exp(tl.sum(of_later, axis=0))
            of_head = (products + (begin * HEADS + head) * ROW) + number * (HEADS * ROW)
            weights = scores * between
            factors = of_head + FACTORS
            tl.store(factors + 2, kept, mask=there)
            if UNIT_EPS is not None:
                beta = tl.sigmoid(tl.load(of_token + BETA, mask=there, other=0.0).to(tl.float32))
                lower = tl.where(later, overlaps * between * beta[:, None], 0.0)
                inverse = _inverse(lower, LENGTH) * beta[None, :]
                tl.store(of_head[:, None] + (LENGTH + number[None, :]), inverse, mask=there[:, None])
                tl.store(factors, kept * unit_query, mask=there)
                tl.store(factors + 1, written * unit_key, mask=there)
                tl.store(factors + 3, kept * unit_key, mask=there)
            else:
                weights *= step[None, :]
                tl.store(factors, kept, mask=there)
                tl.store(factors + 1, written * step, mask=there)
            tl.store(of_head[:, None] + number[None, :], weights, mask=there[:, None])


def is_chunked(shape: ScanShape) -> bool:
    """Whether rows of many tokens are scanned in chunks, if results may depend on how a row is cut into steps."""
    return shape.key_size <= MAX_CHUNKED_KEY_SIZE


def products_size(shape: ScanShape) -> int:
    """Returns the numbers of a token's products: for each head a row of each matrix of its chunk, and factors."""
    return shape.heads * products_row(shape)


def products_row(shape: ScanShape) -> int:
    """Returns the numbers of a token and head among the products."""
    return (2 if shape.erases else 1) * CHUNK + NUM_FACTORS


def _program_heads(shape: ScanShape) -> int:
    return math.gcd(shape.heads // shape.key_heads, MAX_PROGRAM_HEADS)


def block_rows(shape: ScanShape, most: int) -> int:
    """How many rows of a matrix are multiplied at a time."""
    return min(most, max(16, int(triton.next_power_of_2(shape.key_size))))


def precision(shape: ScanShape) -> str:
    """How fp32 is multiplied: as three products in tf32; or in bf16, which need half the registers, and for keys of
    length 1 are exact enough. The interpreter does the first in fp32, and multiplies bf16 incorrectly."""
    return "bf16x3" if shape.erases and not interpreted() else "tf32x3"


@cache
def chunk_products_variant(shape: ScanShape) -> KernelVariant:
    """The variant of the first kernel for a kind of layer."""
    heads_per_key = shape.heads // shape.key_heads
    return KernelVariant(
        _chunk_products,
        {
            "mixed": torch.float32,
            "x": shape.dtype,
            "decay_bias": torch.float32,
            "rates": torch.float32,
            **CHUNK_ARGUMENTS,
            "num_rows": "i32",
            "products": torch.float32,
        },
        {
            "CHANNELS": shape.channels, "COLUMNS": shape.columns, "QUERY": shape.query, "KEY": shape.key,
            "BETA": shape.beta, "DECAY": shape.decay, "HEADS": shape.heads, "HEADS_PER_KEY": heads_per_key,
            "K": shape.key_size, "UNIT_EPS": shape.unit_eps, "LEAST": shape.least_step, "MOST": shape.most_step,
            "LENGTH": CHUNK, "ROW": products_row(shape), "FACTORS": products_row(shape) - NUM_FACTORS,
            "PROGRAM_HEADS": _program_heads(shape), "BLOCK_K": block_rows(shape, 16), "PRECISION": precision(shape),
        },
        num_warps=8,
        num_stages=1,
    )  # fmt: skip


def multiply_chunks(
    shape: ScanShape,
    mixed: Tensor,
    x: Tensor,
    decay_bias: Tensor,
    rates: Tensor,
    chunks: RowChunks,
    products: Tensor,
) -> None:
    """Computes the products of all chunks. The arguments are those of ``scan_chunks``, which checks them."""
    tokens = len(x)
    check(products, (products.numel(),), torch.float32)
    assert products.numel() >= tokens * products_size(shape), products.shape
    # Enough for chunks of half the length; a row has shorter ones only where many states are saved.
    grid = (max(1, tokens // LEAST_CHUNKED), shape.heads // _program_heads(shape))
    num_rows = len(chunks.firsts) - 1
    chunk_products_variant(shape).launch(grid, mixed, x, decay_bias, rates, *chunks, num_rows, products)

"""The scans of rows with many tokens, in chunks, as matrix products: the gated delta rule in its WY form (arXiv
2412.06464) and Mamba-2 in its dual form (arXiv 2405.21060).

A chunk has n tokens with decays a and begins with the state S. Between tokens j <= i the state decays by L[i, j] =
a[j + 1] ... a[i], before token i by p[i] = a[1] ... a[i], after it by r[i] = a[i + 1] ... a[n]. Then

- u = (I + tril(beta (k k^T) L, -1))^-1 beta (v - p (k S)) for the gated delta rule; u = d v for Mamba-2;
- y = p (q S) + tril((q k^T) L) u;
- S = p[n] S + k^T (r u).

The first kernel computes what does not depend on states, all chunks at once; the second goes through the chunks of a
row. Decays are sums of logarithms over just the tokens in between, none of which is positive: nothing overflows, and a
small difference is never that of two large sums.
"""

import math
from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import await_inputs, check
from penstock.kernels.cuda.core.launch import KernelVariant, interpreted
from penstock.kernels.cuda.recurrent.rows import (
    CHUNK,
    LEAST_CHUNKED,
    ROW_ARGUMENTS,
    RecurrentRows,
    RowChunks,
    check_states,
)
from penstock.kernels.cuda.recurrent.scan import ScanShape, softplus

MAX_CHUNKED_KEY_SIZE = 256
"""The most rows of a matrix that a chunk is multiplied with."""
NUM_FACTORS = 4
"""The factors of a token and head, after its rows of matrices: of what its query reads, of what its key writes, of the
state up to it, and of what its key erases."""
BLOCK_V = 16
"""Columns of a matrix per program. With more, registers would spill."""
MAX_PROGRAM_HEADS = 8
"""The most heads of a program that computes products, which all have the same key and query."""
CHUNK_ARGUMENTS = dict.fromkeys(("firsts", "chunk_starts", "chunk_lengths"), torch.int32)
"""The arguments of kernels that get ``RowChunks``."""


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
        scores = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
        overlaps = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
        key_squares = tl.zeros((LENGTH,), dtype=tl.float32)
        query_squares = tl.zeros((LENGTH,), dtype=tl.float32)
        for at in range(0, K, BLOCK_K):
            keys = at + tl.arange(0, BLOCK_K)
            inside = there[:, None] & (keys < K)[None, :]
            key = tl.load(of_key + KEY + keys[None, :], mask=inside, other=0.0)
            query = tl.load(of_key + QUERY + keys[None, :], mask=inside, other=0.0)
            scores = tl.dot(query, tl.trans(key), scores, input_precision=PRECISION)
            if UNIT_EPS is not None:
                overlaps = tl.dot(key, tl.trans(key), overlaps, input_precision=PRECISION)
                key_squares += tl.sum(key * key, axis=1)
                query_squares += tl.sum(query * query, axis=1)
        if UNIT_EPS is not None:
            unit_key = tl.rsqrt(key_squares + UNIT_EPS)
            unit_query = tl.rsqrt(query_squares + UNIT_EPS) * (K**-0.5)
            scores *= unit_query[:, None] * unit_key[None, :]
            overlaps *= unit_key[:, None] * unit_key[None, :]
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


@triton.jit
def _load_keys(of_key, there, keys, part, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Part of the keys of a chunk's tokens, or of their queries."""
    inside = there[:, None] & (part * BLOCK_K + keys < K)[None, :]
    return tl.load(of_key + part * BLOCK_K, mask=inside, other=0.0)


@triton.jit
def _load_parts(
    pointers, keys, columns, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """The parts of a matrix, each of BLOCK_K rows."""
    parts = ()
    for part in tl.static_range(PARTS):
        inside = (part * BLOCK_K + keys < K)[:, None] & (columns < V)[None, :]
        parts += (tl.load(pointers + part * BLOCK_K * V, mask=inside, other=0.0),)  # type: ignore[assignment]
    return parts


@triton.jit
def _store_parts(
    pointers, parts, keys, columns, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Stores what ``_load_parts`` returns."""
    for part in tl.static_range(PARTS):
        inside = (part * BLOCK_K + keys < K)[:, None] & (columns < V)[None, :]
        tl.store(pointers + part * BLOCK_K * V, parts[part], mask=inside)


@triton.jit
def _scan_chunks(
    mixed, products, skips, matrices, slots, starts, counts, advancing, saves, firsts, chunk_starts, chunk_lengths, y,
    CHANNELS: tl.constexpr, QUERY: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ERASES: tl.constexpr, STRIDE: tl.constexpr,
    LENGTH: tl.constexpr, ROW: tl.constexpr, FACTORS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program advances some columns of one head's matrix, in parts of BLOCK_K rows, by the chunks of one row."""
    await_inputs(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(firsts + row), tl.load(firsts + row + 1)
    if first == end:
        return
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    number = tl.arange(0, LENGTH)
    keys = tl.arange(0, BLOCK_K)
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    start = tl.load(starts + row)
    advanced = tl.load(advancing + row)
    of_head = matrices + head * (K * V) + keys[:, None] * V + columns[None, :]
    live = of_head + tl.load(slots + row).to(tl.int64) * STRIDE
    state = _load_parts(live, keys, columns, K, V, BLOCK_K, PARTS)
    at_value = head * V + columns
    for chunk in range(first, end):
        begin = tl.load(chunk_starts + chunk).to(tl.int64)
        length = tl.load(chunk_lengths + chunk)
        there = number < length
        has_value = there[:, None] & (columns < V)[None, :]
        of_token = (mixed + begin * CHANNELS) + number[:, None] * CHANNELS
        of_key = of_token + ((head // HEADS_PER_KEY) * K + keys)[None, :]
        first_product = products + (begin * HEADS + head) * ROW
        of_product = first_product + number * (HEADS * ROW)
        value = tl.load(of_token + (VALUE + at_value)[None, :], mask=has_value, other=0.0)
        known = tl.zeros((LENGTH, BLOCK_V), dtype=tl.float32)
        result = tl.zeros((LENGTH, BLOCK_V), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            if ERASES:
                key = _load_keys(of_key + KEY, there, keys, part, K, BLOCK_K)
                known = tl.dot(key, state[part], known, input_precision=PRECISION)
            query = _load_keys(of_key + QUERY, there, keys, part, K, BLOCK_K)
            result = tl.dot(query, state[part], result, input_precision=PRECISION)
        result *= tl.load(of_product + FACTORS, mask=there, other=0.0)[:, None]
        added = value
        if ERASES:
            added -= known * tl.load(of_product + (FACTORS + 3), mask=there, other=0.0)[:, None]
            inverse = tl.load(of_product[:, None] + (LENGTH + number[None, :]), mask=there[:, None], other=0.0)
            added = tl.dot(inverse, added, input_precision=PRECISION)
        weights = tl.load(of_product[:, None] + number[None, :], mask=there[:, None], other=0.0)
        result = tl.dot(weights, added, result, input_precision=PRECISION)
        if skips is not None:
            result += value * tl.load(skips + head)
        of_result = (y + begin * (HEADS * V)) + (number[:, None] * (HEADS * V) + at_value[None, :])
        tl.store(of_result, result, mask=has_value)
        added *= tl.load(of_product + (FACTORS + 1), mask=there, other=0.0)[:, None]
        kept = tl.load(first_product + (length - 1) * (HEADS * ROW) + (FACTORS + 2))
        advanced_state = ()
        for part in tl.static_range(PARTS):
            key = _load_keys(of_key + KEY, there, keys, part, K, BLOCK_K)
            made = tl.dot(tl.trans(key), added, state[part] * kept, input_precision=PRECISION)
            advanced_state += (made,)  # type: ignore[assignment]
        state = advanced_state
        reached = begin + length - start
        if reached <= advanced:
            save = tl.load(saves + begin + length - 1)
            if save > 0:
                _store_parts(of_head + (save - 1).to(tl.int64) * STRIDE, state, keys, columns, K, V, BLOCK_K, PARTS)
            if reached == advanced:
                _store_parts(live, state, keys, columns, K, V, BLOCK_K, PARTS)


def is_chunked(shape: ScanShape) -> bool:
    """Whether rows of many tokens are scanned in chunks, if results may depend on how a row is cut into steps."""
    return shape.key_size <= MAX_CHUNKED_KEY_SIZE


def products_size(shape: ScanShape) -> int:
    """Returns the numbers of a token's products: for each head a row of each matrix of its chunk, and factors."""
    return shape.heads * _row(shape)


def _row(shape: ScanShape) -> int:
    return (2 if shape.erases else 1) * CHUNK + NUM_FACTORS


def _program_heads(shape: ScanShape) -> int:
    return math.gcd(shape.heads // shape.key_heads, MAX_PROGRAM_HEADS)


def _block_k(shape: ScanShape, most: int) -> int:
    """How many rows of a matrix are multiplied at a time."""
    return min(most, max(16, int(triton.next_power_of_2(shape.key_size))))


def _precision(shape: ScanShape) -> str:
    """How fp32 is multiplied: as three products in tf32; or in bf16, which need half the registers, and for keys of
    length 1 are exact enough. The interpreter, which has only the first, multiplies in fp32."""
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
            "LENGTH": CHUNK, "ROW": _row(shape),
            "FACTORS": _row(shape) - NUM_FACTORS, "PROGRAM_HEADS": _program_heads(shape),
            "BLOCK_K": _block_k(shape, 16), "PRECISION": _precision(shape),
        },
        num_warps=8,
        num_stages=1,
    )  # fmt: skip


@cache
def scan_chunks_variant(shape: ScanShape) -> KernelVariant:
    """The variant of the second kernel for a kind of layer."""
    return KernelVariant(
        _scan_chunks,
        {
            "mixed": torch.float32,
            "products": torch.float32,
            "skips": None if shape.erases else torch.float32,
            "matrices": torch.float32,
            **ROW_ARGUMENTS,
            **CHUNK_ARGUMENTS,
            "y": torch.float32,
        },
        {
            "CHANNELS": shape.channels, "QUERY": shape.query, "KEY": shape.key, "VALUE": shape.value,
            "HEADS": shape.heads, "HEADS_PER_KEY": shape.heads // shape.key_heads, "K": shape.key_size,
            "V": shape.value_size, "ERASES": shape.erases, "STRIDE": shape.stride, "LENGTH": CHUNK,
            "ROW": _row(shape), "FACTORS": _row(shape) - NUM_FACTORS, "BLOCK_K": _block_k(shape, 64),
            "BLOCK_V": BLOCK_V, "PRECISION": _precision(shape),
        },
        num_warps=4 if shape.erases else 8,
        num_stages=1,
    )  # fmt: skip


def chunked_scan_variants(shape: ScanShape) -> Iterator[KernelVariant]:
    """Both kernels for a kind of layer."""
    yield chunk_products_variant(shape)
    yield scan_chunks_variant(shape)


def scan_chunks(
    shape: ScanShape,
    mixed: Tensor,
    x: Tensor,
    decay_bias: Tensor,
    rates: Tensor,
    skips: Tensor | None,
    matrices: Tensor,
    rows: RecurrentRows,
    chunks: RowChunks,
    products: Tensor,
    y: Tensor,
) -> None:
    """Computes what ``scan`` does, for the rows that have chunks.

    ``products`` fp32 is room for ``products_size`` numbers for each of the T tokens. The other arguments are those of
    ``scan``.
    """
    tokens, _ = x.shape
    num_rows = rows.check_sizes(tokens)
    chunks.check_sizes(num_rows)
    check(x, (tokens, shape.columns), shape.dtype)
    check(mixed, (tokens, shape.channels), torch.float32)
    for vector in (decay_bias, rates) if skips is None else (decay_bias, rates, skips):
        check(vector, (shape.heads,), torch.float32)
    check_states(matrices, shape.stride)
    assert matrices.shape[1:] == (shape.heads, shape.key_size, shape.value_size), matrices.shape
    check(y, (tokens, shape.heads * shape.value_size), torch.float32)
    check(products, (products.numel(),), torch.float32)
    assert products.numel() >= tokens * products_size(shape), products.shape
    first, second = chunked_scan_variants(shape)
    # Enough for chunks of half the length; a row has shorter ones only where many states are saved.
    grid = (max(1, tokens // LEAST_CHUNKED), shape.heads // _program_heads(shape))
    first.launch(grid, mixed, x, decay_bias, rates, *chunks, num_rows, products)
    columns = triton.cdiv(shape.value_size, BLOCK_V)
    second.launch((num_rows, shape.heads, columns), mixed, products, skips, matrices, *rows, *chunks, y)

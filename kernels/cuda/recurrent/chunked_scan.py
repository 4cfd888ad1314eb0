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

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import await_inputs, check
from penstock.kernels.cuda.core.launch import KernelVariant
from penstock.kernels.cuda.recurrent.chunk_products import (
    CHUNK_ARGUMENTS,
    NUM_FACTORS,
    block_rows,
    chunk_products_variant,
    multiply,
    multiply_chunks,
    precision,
    products_row,
)
from penstock.kernels.cuda.recurrent.rows import CHUNK, ROW_ARGUMENTS, RecurrentRows, RowChunks, check_states
from penstock.kernels.cuda.recurrent.scan import ScanShape

BLOCK_V = 16
"""Columns of a matrix per program. With more, registers would spill."""


@triton.jit
def _load_keys(of_key, there, keys, part, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Part of the keys of a chunk's tokens, or of their queries."""
    inside = there[:, None] & (part * BLOCK_K + keys < K)[None, :]
    return tl.load(of_key + part * BLOCK_K, mask=inside, other=0.0)


@triton.jit
def _multiply_state(
    of_query, of_key, there, keys, state, K: tl.constexpr, ERASES: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products of a chunk's queries and, with ERASES, of its keys with a matrix. A part of it is read by both at
    once, which takes fewer registers."""
    result = tl.zeros((LENGTH, BLOCK_V), dtype=tl.float32)
    known = tl.zeros((LENGTH, BLOCK_V), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        if ERASES:
            key = _load_keys(of_key, there, keys, part, K, BLOCK_K)
            known = multiply(key, state[part], known, PRECISION)
        query = _load_keys(of_query, there, keys, part, K, BLOCK_K)
        result = multiply(query, state[part], result, PRECISION)
    return result, known


@triton.jit
def _add_keys(
    state, kept, of_key, added, there, keys, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The parts of a matrix, decayed by ``kept``, plus the product of a chunk's keys with what they add."""
    parts = ()
    for part in tl.static_range(PARTS):
        key = _load_keys(of_key, there, keys, part, K, BLOCK_K)
        made = multiply(tl.trans(key), added, state[part] * kept, PRECISION)
        parts += (made,)  # type: ignore[assignment]
    return parts


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
        result, known = _multiply_state(
            of_key + QUERY, of_key + KEY, there, keys, state, K, ERASES, LENGTH, BLOCK_K, BLOCK_V, PARTS, PRECISION
        )
        result *= tl.load(of_product + FACTORS, mask=there, other=0.0)[:, None]
        added = value
        if ERASES:
            added -= known * tl.load(of_product + (FACTORS + 3), mask=there, other=0.0)[:, None]
            inverse = tl.load(of_product[:, None] + (LENGTH + number[None, :]), mask=there[:, None], other=0.0)
            added = multiply(inverse, added, tl.zeros((LENGTH, BLOCK_V), dtype=tl.float32), PRECISION)
        weights = tl.load(of_product[:, None] + number[None, :], mask=there[:, None], other=0.0)
        result = multiply(weights, added, result, PRECISION)
        if skips is not None:
            result += value * tl.load(skips + head)
        of_result = (y + begin * (HEADS * V)) + (number[:, None] * (HEADS * V) + at_value[None, :])
        tl.store(of_result, result, mask=has_value)
        added *= tl.load(of_product + (FACTORS + 1), mask=there, other=0.0)[:, None]
        kept = tl.load(first_product + (length - 1) * (HEADS * ROW) + (FACTORS + 2))
        state = _add_keys(state, kept, of_key + KEY, added, there, keys, K, BLOCK_K, PARTS, PRECISION)
        reached = begin + length - start
        if reached <= advanced:
            save = tl.load(saves + begin + length - 1)
            if save > 0:
                _store_parts(of_head + (save - 1).to(tl.int64) * STRIDE, state, keys, columns, K, V, BLOCK_K, PARTS)
            if reached == advanced:
                _store_parts(live, state, keys, columns, K, V, BLOCK_K, PARTS)


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
            "ROW": products_row(shape), "FACTORS": products_row(shape) - NUM_FACTORS, "BLOCK_K": block_rows(shape, 64),
            "BLOCK_V": BLOCK_V, "PRECISION": precision(shape),
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
    multiply_chunks(shape, mixed, x, decay_bias, rates, chunks, products)
    columns = triton.cdiv(shape.value_size, BLOCK_V)
    variant = scan_chunks_variant(shape)
    variant.launch((num_rows, shape.heads, columns), mixed, products, skips, matrices, *rows, *chunks, y)

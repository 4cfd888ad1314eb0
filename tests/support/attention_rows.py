"""A sequence whose attention the CPU library computes. Its pages lie among poisoned ones; numpy in float64 computes the
expected outputs."""

import math
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu.bindings import (
    LANES,
    QUERY_TILE,
    SPLIT,
    AttentionItem,
    AttentionRow,
    Kernels,
    KvLayout,
    PagedAttention,
    StorageFormat,
)

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]
Array = TypeVar("Array", Floats, Doubles)

FORMATS = (StorageFormat.F32, StorageFormat.BF16, StorageFormat.INT8)
GUARD = 64
POISON = 0xFF


@dataclass(frozen=True)
class Case:
    """Queries at the last `num_queries` positions of a context."""

    head_dim: int
    kv_heads: int
    group: int
    context: int
    num_queries: int
    window: int = 0
    chunked: bool = False
    soft_cap: float = 0.0
    sinks: bool = False
    is_latent: bool = False
    """Whether the KV heads are one head, whose keys are the values too."""

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def start(self) -> int:
        return self.context - self.num_queries

    def first_seen(self, query: Positions) -> Positions:
        """The first position that each query sees."""
        if not self.window:
            return query * 0
        return query // self.window * self.window if self.chunked else np.maximum(query + 1 - self.window, 0)


def aligned(size: int) -> Bytes:
    """Poisoned bytes at an address that is a multiple of 64, with a guard behind them."""
    raw = np.full(size + GUARD + 64, POISON, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + size + GUARD]


def assert_guarded(memory: Bytes) -> None:
    """Nothing was written behind the end."""
    assert (memory[-GUARD:] == POISON).all()


def make_layout(kv_format: StorageFormat, kv_heads: int, head_dim: int, *, is_latent: bool = False) -> KvLayout:
    """As core/kernel_table.h draws it."""
    padded = -(-head_dim // LANES) * LANES
    head_bytes = {
        StorageFormat.F32: 128 * padded,
        StorageFormat.BF16: 64 * padded,
        StorageFormat.INT8: 32 * padded + 128,
    }[kv_format]
    if is_latent:
        return KvLayout(kv_format, kv_heads, head_dim, head_bytes // 2, head_bytes // 2, True)
    return KvLayout(kv_format, kv_heads, head_dim, head_bytes, head_bytes * kv_heads)


def bf16(x: Floats) -> Floats:
    """Rounded to bfloat16, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def hadamard(heads: Array) -> Array:
    """The transform of the last axis, over the largest power of two that divides it, in core/hadamard.h's order."""
    half, block = 1, heads.shape[-1] & -heads.shape[-1]
    while half < block:
        pairs = heads.reshape(*heads.shape[:-1], -1, 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        heads = np.stack((first + second, first - second), axis=-2).reshape(heads.shape)
        half *= 2
    return heads


def restored(heads: Array) -> Array:
    """What the transform is of."""
    result: Array = hadamard(heads) / (heads.shape[-1] & -heads.shape[-1])
    return result


def unpack(layout: KvLayout, page: Bytes) -> tuple[Doubles, Doubles]:
    """Keys and values of a page, (16, kv_heads, head_dim) each, by the layout in core/kernel_table.h; those of formats
    that round are transformed."""
    per = {StorageFormat.F32: 1, StorageFormat.BF16: 2, StorageFormat.INT8: 4}[StorageFormat(layout.format)]
    padded = -(-layout.head_dim // LANES) * LANES
    keys, values = [], []
    for head in range(1 if layout.is_latent else layout.kv_heads):
        data = page[head * layout.head_bytes : (head + 1) * layout.head_bytes]
        section = padded * LANES * 4 // per
        key_words = data[:section].reshape(padded // per, LANES, per, 4 // per).transpose(1, 0, 2, 3)
        value_words = key_words
        if not layout.is_latent:
            value_words = data[section : 2 * section].reshape(LANES // per, padded, per, 4 // per).transpose(0, 2, 1, 3)
        key_bytes = np.ascontiguousarray(key_words).reshape(LANES, padded, 4 // per)
        value_bytes = np.ascontiguousarray(value_words).reshape(LANES, padded, 4 // per)
        if layout.format == StorageFormat.F32:
            key, value = (part.view(np.float32)[..., 0] for part in (key_bytes, value_bytes))
        elif layout.format == StorageFormat.BF16:
            key, value = (
                (part.view(np.uint16)[..., 0].astype(np.uint32) << 16).view(np.float32)
                for part in (key_bytes, value_bytes)
            )
        else:
            scales = data[2 * section :].view(np.float32).reshape(2, LANES, 1)
            key = (key_bytes[..., 0].astype(np.float32) - 128) * scales[0]
            value = value_bytes.view(np.int8)[..., 0] * scales[1]
        keys.append(key[:, : layout.head_dim])
        values.append(value[:, : layout.head_dim])
    return np.stack(keys, 1).astype(np.float64), np.stack(values, 1).astype(np.float64)


class Sequence:
    """A row with its pages, among others that are poisoned."""

    def __init__(self, table: Kernels, kv_format: StorageFormat, case: Case, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.table, self.case = table, case
        self.layout = make_layout(kv_format, case.kv_heads, case.head_dim, is_latent=case.is_latent)
        num_pages = -(-case.context // LANES)
        self.page_ids = rng.permutation(num_pages + 3)[:num_pages].astype(np.int32)
        self.pages = aligned(self.layout.page_bytes * (num_pages + 3))
        shape = (case.context, 1 if case.is_latent else case.kv_heads, case.head_dim)
        self.keys = rng.standard_normal(shape, np.float32)
        self.values = self.keys if case.is_latent else rng.standard_normal(shape, np.float32) + 0.5
        # Queries and outputs of a batch, whose other tokens and columns are poisoned.
        self.width = case.num_heads * case.head_dim
        self.token = 2
        self.queries = np.full((case.num_queries + 4, self.width + 5), np.nan, np.float32)
        self.queries[2:-2, : self.width] = 2 * rng.standard_normal((case.num_queries, self.width), np.float32)
        self.sinks = rng.standard_normal(case.num_heads, np.float32) + 2

    def page(self, index: int) -> Bytes:
        """The page of positions [16 index, 16 index + 16)."""
        begin = int(self.page_ids[index]) * self.layout.page_bytes
        return self.pages[begin : begin + self.layout.page_bytes]

    def write(self, begin: int, end: int) -> None:
        """The KV of some positions, in order."""
        while begin < end:
            page, slot = self.page(begin // LANES).ctypes.data, begin % LANES
            tokens = min(end - begin, LANES - slot)
            rows = self.keys[begin].ctypes.data, self.values[begin].ctypes.data
            self.table.write_kv(self.layout, page, slot, tokens, *rows, self.keys[0].size)
            begin += tokens

    def attend(
        self,
        cuts: list[int],
        *,
        spread: int = 0,
        from_first_seen: bool = False,
        row_start: int | None = None,
        num_nan: int = 0,
        heads: int = 1,
    ) -> Floats:
        """The outputs of the queries at positions [cuts[0], cuts[-1]), in tiles between the cuts; (T, heads, head_dim).

        spread: splits of an item, whose partial results are merged then; 0: an item has all of them.
        num_nan: numbers that are none. heads: KV heads of an item.
        """
        case = self.case
        output = np.full_like(self.queries, np.nan)
        attention = PagedAttention(
            self.layout, self.pages.ctypes.data, case.num_heads, case.window, case.chunked, case.head_dim**-0.5,
            case.soft_cap, self.sinks.ctypes.data if case.sinks else None, self.queries.ctypes.data,
            self.queries.shape[1], output.ctypes.data, output.shape[1],
        )  # fmt: skip
        start = case.start if row_start is None else row_start
        token = self.token + start - case.start
        row = AttentionRow(self.page_ids.ctypes.data, token, start, cuts[-1])
        scratch = aligned(self.table.attention_scratch(attention))
        for begin, end in pairwise(cuts):
            first = int(case.first_seen(np.array(begin))) // SPLIT if from_first_seen else 0
            item = AttentionItem(0, 0, 1, begin, end, first, (end - 1) // SPLIT + 1, -1)
            for kv_head in range(0, case.kv_heads, heads):
                item.kv_head_begin, item.kv_head_end = kv_head, min(kv_head + heads, case.kv_heads)
                scratch[:-GUARD] = POISON
                if spread:
                    self._attend_spread(attention, row, item, scratch, spread)
                else:
                    self.table.attend(attention, row, item, scratch.ctypes.data, None)
        assert_guarded(scratch)
        done = output[token + cuts[0] - start : token + cuts[-1] - start, : self.width].copy()
        assert (~np.isfinite(done)).sum() == num_nan
        output[token + cuts[0] - start : token + cuts[-1] - start, : self.width] = np.nan
        assert np.isnan(output).all(), "written outside of the queries"
        return done.reshape(len(done), case.num_heads, case.head_dim)

    def _attend_spread(
        self, attention: PagedAttention, row: AttentionRow, item: AttentionItem, scratch: Bytes, spread: int
    ) -> None:
        """Computes items of ``spread`` splits each, the last one first."""
        size = self.table.partial_floats(attention) * self.case.group * (item.query_end - item.query_begin)
        splits = item.split_end - item.split_begin
        base = 7  # floats of some other tile
        partials = aligned((base + splits * size) * 4)
        for begin in reversed(range(item.split_begin, item.split_end, spread)):
            end = min(begin + spread, item.split_end)
            part = copy(item)
            part.split_begin, part.split_end, part.partial = begin, end, base + (begin - item.split_begin) * size
            self.table.attend(attention, row, part, scratch.ctypes.data, partials.ctypes.data)
        assert_guarded(partials)
        assert (partials[: base * 4] == POISON).all()
        whole = copy(item)
        whole.partial = base
        self.table.merge(attention, row, whole, splits, partials.ctypes.data)

    def tiles(self) -> list[int]:
        """Cuts at whole tiles from position 0 on, as far as they fall between the queries."""
        case = self.case
        return [case.start, *range((case.start // QUERY_TILE + 1) * QUERY_TILE, case.context, QUERY_TILE), case.context]

    def expected(self, *, stored: bool) -> tuple[Doubles, Doubles]:
        """Outputs, and the weighted mean of the values' magnitudes, (T, heads, head_dim) each.

        stored: from keys and values as the pages hold them, and queries as the format rounds them.
        """
        case = self.case
        queries = self.queries[2:-2, : self.width]
        keys, values = self.keys.astype(np.float64), self.values.astype(np.float64)
        if stored:
            pages = [unpack(self.layout, self.page(i)) for i in range(len(self.page_ids))]
            keys = np.concatenate([key for key, _ in pages])[: case.context]
            values = np.concatenate([value for _, value in pages])[: case.context]
            if self.layout.format != StorageFormat.F32:
                keys, values = restored(keys), restored(values)
        if case.is_latent:
            keys = values = np.repeat(keys, case.kv_heads, axis=1)
        heads = queries.reshape(-1, case.kv_heads, case.group, case.head_dim)
        if stored and self.layout.format == StorageFormat.BF16:
            heads = restored(bf16(hadamard(heads)).astype(np.float64))
        scores = np.einsum("qkgd,tkd->kgqt", heads.astype(np.float64), keys) * case.head_dim**-0.5
        if case.soft_cap:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        query, position = np.arange(case.start, case.context)[:, None], np.arange(case.context)[None]
        seen = (position <= query) & (position >= case.first_seen(query))
        sinks = self.sinks.reshape(case.kv_heads, case.group, 1, 1) if case.sinks else -math.inf
        weights = np.exp(np.where(seen, scores, -math.inf))
        weights /= weights.sum(-1, keepdims=True) + np.exp(sinks)
        shape = (-1, case.num_heads, case.head_dim)
        return (
            np.einsum("kgqt,tkd->qkgd", weights, values).reshape(shape),
            np.einsum("kgqt,tkd->qkgd", weights, np.abs(values)).reshape(shape),
        )

"""What the two attention kernels share: the shape of a layer's attention, the walk over pages, the softmax as it goes.

Scores are logarithms to base 2: exp(s) = exp2(s log2 e), and log2 e goes into the scale. A running maximum may be
-inf, of a query that has seen no key yet; nothing is ever subtracted from that.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import product_dtype

PAGE_SLOTS = 16
SLOTS = tl.constexpr(PAGE_SLOTS)
LOG2E = tl.constexpr(math.log2(math.e))
BLOCK_SEQUENCES = tl.constexpr(128)
"""Sequences that a search looks at together."""

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
"""Multiples of 8 between these."""
KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@dataclass(frozen=True)
class AttentionShape:
    """What the attention of a layer is compiled for: the same for most layers of a model, or one of two."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Of queries and output."""
    kv_dtype: torch.dtype
    """Of pages: ``dtype``, or float8_e4m3fn with a scale of each KV head."""
    scale: float
    window: int | None = None
    """A query at position p sees those from p - window + 1 on; None: all."""
    cap: float | None = None
    """Scores s become cap tanh(s / cap); None: they are kept."""

    def __post_init__(self) -> None:
        """Our own bugs."""
        assert self.num_heads % self.num_kv_heads == 0
        assert MIN_HEAD_DIM <= self.head_dim <= MAX_HEAD_DIM
        assert self.head_dim % 8 == 0
        assert self.dtype in KV_DTYPES[:3]
        assert self.kv_dtype in (self.dtype, torch.float8_e4m3fn)
        assert self.scale > 0
        assert self.window is None or self.window > 0
        assert self.cap is None or self.cap > 0

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def block_dim(self) -> int:
        """The head size, as wide as it is computed."""
        return int(triton.next_power_of_2(self.head_dim))

    def constants(self) -> dict[str, object]:
        """What every kernel is told of it."""
        return {
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": self.block_dim,
            "SCALE": self.scale,
            "CAP": self.cap,
            "WINDOW": self.window,
            "PRODUCT": product_dtype(self.dtype),  # of queries; keys and values are converted to it
        }


@dataclass(frozen=True)
class RaggedRows:
    """A step's B sequences on the device. Those that only fill a bucket have no queries, and a context of 0."""

    tables: Tensor
    """(R, max_pages) int32: pages of every row; what is no page of the row's context may hold anything."""
    rows: Tensor
    """(B,) int32: the row of each sequence."""
    query_starts: Tensor
    """(B + 1,) int32: its tokens are those from ``query_starts[b]`` up to ``query_starts[b + 1]``."""
    contexts: Tensor
    """(B,) int32: its tokens in pages, those of this step with them."""

    def __post_init__(self) -> None:
        """Our own bugs."""
        (num_sequences,) = self.rows.shape
        assert self.query_starts.shape == (num_sequences + 1,)
        assert self.contexts.shape == (num_sequences,)
        assert self.tables.dim() == 2
        for tensor in (self.tables, self.rows, self.query_starts, self.contexts):
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()

    @property
    def num_sequences(self) -> int:
        """B."""
        return int(self.rows.shape[0])


@dataclass(frozen=True)
class PagedKV:
    """A layer's keys and values, and what else its attention reads."""

    pages: Tensor
    """(num_pages, 2, K, 16, D): keys, then values."""
    key_scales: Tensor
    """(K,) fp32: what stored keys are multiplied by; 1 unless they are fp8."""
    value_scales: Tensor
    sinks: Tensor
    """(H,) fp32: a score of each head that takes part in the softmax and has no value; -inf where there is none."""

    def check(self, shape: AttentionShape) -> None:
        """Our own bugs."""
        heads = shape.num_kv_heads
        assert self.pages.shape[1:] == (2, heads, PAGE_SLOTS, shape.head_dim), self.pages.shape
        assert self.pages.dtype == shape.kv_dtype
        assert self.key_scales.shape == self.value_scales.shape == (heads,)
        assert self.sinks.shape == (shape.num_heads,)
        for tensor in (self.pages, self.key_scales, self.value_scales, self.sinks):
            assert tensor.is_contiguous()


NUMBERS = ("max_pages", "num_sequences")
"""Arguments of both kernels that are no tensors."""


def shared_arguments(shape: AttentionShape) -> dict[str, torch.dtype | str]:
    """What the kernels of decoding and of prefill both are given."""
    return {
        **dict.fromkeys(("query", "out"), shape.dtype),
        "pages": shape.kv_dtype,
        **dict.fromkeys(("key_scales", "value_scales", "sinks"), torch.float32),
        **dict.fromkeys(("tables", "rows", "query_starts", "contexts"), torch.int32),
        **dict.fromkeys(NUMBERS, "i32"),
    }


def shared_values(query: Tensor, out: Tensor, kv: PagedKV, batch: RaggedRows) -> tuple[Tensor | int, ...]:
    """The values of ``shared_arguments``, in that order."""
    of_rows = (batch.tables, batch.rows, batch.query_starts, batch.contexts)
    of_layer = (kv.pages, kv.key_scales, kv.value_scales, kv.sinks)
    return (query, out, *of_layer, *of_rows, batch.tables.shape[1], batch.num_sequences)


@triton.jit
def find_sequence(starts, num_sequences, unit):
    """b with ``starts[b] <= unit < starts[b + 1]``, for ascending ``starts`` (num_sequences + 1,)."""
    found = 0
    for begin in range(0, num_sequences, BLOCK_SEQUENCES):
        at = begin + tl.arange(0, BLOCK_SEQUENCES)
        ends = tl.load(starts + 1 + at, mask=at < num_sequences, other=0x7FFFFFFF)
        found += tl.sum((ends <= unit).to(tl.int32), axis=0)
    return found


@triton.jit
def lowest_seen(position, WINDOW: tl.constexpr):
    """The first position that a query at ``position`` sees."""
    if WINDOW is None:
        return position * 0
    else:
        return tl.maximum(position - (WINDOW - 1), 0)


@triton.jit
def query_offsets(
    begin, tile, head, num_queries, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The rows of a tile are all heads of a group for its first query, then those for its second, and so on.

    Returns of each row: its query in the sequence, its row in (T * H, D), whether there is such a query.
    """
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    index = row // GROUP
    offsets = ((begin + index).to(tl.int64) * NUM_KV_HEADS + head) * GROUP + row % GROUP
    return index, offsets, index < num_queries


@triton.jit
def page_ids(table, start, lowest, end, BLOCK_N: tl.constexpr):
    """The page of each position from ``start`` on; 0 for those below ``lowest`` and from ``end`` on."""
    positions = start + tl.arange(0, BLOCK_N)
    return tl.load(table + positions // SLOTS, mask=(positions >= lowest) & (positions < end), other=0)


@triton.jit
def attend(
    query,
    query_positions,
    maximum,
    total,
    mixed,
    pages,
    table,
    head,
    factor,
    begin,
    end,
    lowest,
    MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Takes the keys and values from ``begin``, a multiple of BLOCK_N, up to ``end`` into the running softmax.

    For each query: ``maximum`` of its scores, ``total`` of exp2(score - maximum), and ``mixed``, the values weighted by
    those. MASKED: not every query sees every position there is in these blocks; positions below ``lowest`` and from
    ``end`` on are not read, so that it does not matter what lies there.
    """
    BLOCK_D: tl.constexpr = query.shape[1]
    dims = tl.arange(0, BLOCK_D)
    page_size: tl.constexpr = NUM_KV_HEADS * SLOTS * HEAD_DIM
    pages += head * (SLOTS * HEAD_DIM)
    page = page_ids(table, begin, lowest, end, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        slot = page.to(tl.int64) * (2 * page_size) + positions % SLOTS * HEAD_DIM
        # The next block's pages, ahead of time: a load that waits for a load of its own round could not be prefetched.
        page = page_ids(table, start + BLOCK_N, lowest, end, BLOCK_N)
        pointers = pages + slot[:, None] + dims[None, :]
        if MASKED or BLOCK_D != HEAD_DIM:
            there = (dims < HEAD_DIM)[None, :]
            if MASKED:
                there &= ((positions >= lowest) & (positions < end))[:, None]
            key = tl.load(pointers, mask=there, other=0.0)
            value = tl.load(pointers + page_size, mask=there, other=0.0)
        else:
            key = tl.load(pointers)
            value = tl.load(pointers + page_size)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="tf32x3")
        if CAP is not None:
            # tanh(s / cap), from tanh(x) = 1 - 2 / (exp(2x) + 1), which an infinite exp(2x) leaves at 1
            scores = 1.0 - 2.0 / (tl.exp2(scores * factor) + 1.0)
        if MASKED:
            seen = positions[None, :] <= query_positions[:, None]
            if WINDOW is not None:
                seen &= positions[None, :] > query_positions[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        # What is left to multiply by comes behind the mask: masked or not, each weight is exp2 of one multiply-add.
        rest = factor if CAP is None else CAP * LOG2E
        raised = tl.maximum(maximum, tl.max(scores, axis=1) * rest)
        base = tl.where(raised == float("-inf"), 0.0, raised)
        weights = tl.exp2(scores * rest - base[:, None])
        kept = tl.exp2(maximum - base)
        total = total * kept + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(query.dtype), value.to(query.dtype), mixed * kept[:, None], input_precision="tf32x3")
        maximum = raised
    return maximum, total, mixed


@triton.jit
def score_factor(key_scale, SCALE: tl.constexpr, CAP: tl.constexpr):
    """What a product of query and key is multiplied by: to make it a score in log2, or the 2x of the cap's exp(2x)."""
    if CAP is None:
        return key_scale * (SCALE * LOG2E)
    else:
        return key_scale * (SCALE * 2.0 * LOG2E / CAP)


@triton.jit
def final_weight(maximum, total, sink):
    """What mixed values are multiplied by in the end: 1 / total, with the sink in it; 0 if nothing was seen."""
    raised = tl.maximum(maximum, sink * LOG2E)
    base = tl.where(raised == float("-inf"), 0.0, raised)
    kept = tl.exp2(maximum - base)
    divisor = total * kept + tl.exp2(sink * LOG2E - base)
    return kept / tl.where(divisor > 0.0, divisor, 1.0)

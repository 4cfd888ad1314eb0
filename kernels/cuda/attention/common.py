"""Shared by the two attention kernels: the shape of a layer's attention, the loop over pages, and the online softmax.

Scores are logarithms to base 2: exp(s) = exp2(s log2 e), with log2 e folded into the scale. The running maximum of a
query that has seen no key yet is -inf; it is replaced by 0 before anything is subtracted.
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
MAX_FP16 = tl.constexpr(65504.0)
BLOCK_SEQUENCES = tl.constexpr(128)
"""Sequences that a search compares at a time."""

MIN_PRODUCT = 16
"""The least number of columns and rows of a product's operands."""
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 512
"""Head sizes are multiples of 8 in this range."""
MAX_ROTATED_DIM = 64
"""The limit of the rotated part of latent attention's keys, which are multiples of 8 too."""
KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@dataclass(frozen=True)
class AttentionShape:
    """The properties of a layer's attention that kernels are compiled for. A model's layers have one or two different
    ones."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """The dtype of queries and output."""
    kv_dtype: torch.dtype
    """The dtype of pages: ``dtype``, or float8_e4m3fn with a scale for each KV head."""
    scale: float
    window: int | None = None
    """A query at position p sees positions from p - window + 1 on, or, if ``chunked``, from the start of its chunk;
    None: all."""
    cap: float | None = None
    """The soft cap of scores: s becomes cap tanh(s / cap). None: no cap."""
    chunked: bool = False
    """Whether the window is the size of chunks, which begin at multiples of it."""
    rotated_dim: int = 0
    """With latent attention, the size of the rotated part of queries and keys, which comes before their other
    ``head_dim`` dimensions. Those of a key are also its value, so pages have only keys. 0: values are apart."""
    wide_products: bool = True
    """Whether the GPU has ``WIDE_PRODUCTS``, whose operands are in shared memory. On others, they take registers."""

    def __post_init__(self) -> None:
        """Asserts that the kernels support the shape; the caller has validated the model."""
        assert self.num_heads % self.num_kv_heads == 0
        assert MIN_HEAD_DIM <= self.head_dim <= MAX_HEAD_DIM
        assert self.head_dim % 8 == 0
        assert self.dtype in KV_DTYPES[:3]
        assert self.kv_dtype in (self.dtype, torch.float8_e4m3fn)
        assert self.scale > 0
        assert self.window is None or self.window > 0
        assert self.cap is None or self.cap > 0
        assert self.rotated_dim % 8 == 0
        assert self.rotated_dim <= MAX_ROTATED_DIM
        if self.rotated_dim:  # there are neither scales for fp8 nor windows
            assert self.kv_dtype == self.dtype
            assert self.num_kv_heads == 1
            assert self.window is None

    @property
    def key_dim(self) -> int:
        """The size of a head's queries and keys."""
        return self.rotated_dim + self.head_dim

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        """The shape of a page: keys, and values if they are apart, of each KV head."""
        return 1 if self.rotated_dim else 2, self.num_kv_heads, PAGE_SLOTS, self.key_dim

    @property
    def group(self) -> int:
        """The number of query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def block_dim(self) -> int:
        """The head size, padded to a power of 2 for computing."""
        return int(triton.next_power_of_2(self.head_dim))

    @property
    def product_dtype(self) -> torch.dtype:
        """The dtype of products' operands. fp16 has all values of fp8, and Hopper converts fp8 to it faster than to
        bf16. With larger heads it spills registers."""
        is_half = self.dtype.itemsize == 2 and self.kv_dtype == torch.float8_e4m3fn
        return torch.float16 if is_half and self.block_dim <= 128 else self.dtype

    @property
    def window_constant(self) -> int | None:
        """The constant WINDOW of kernels: the window, or minus the size of chunks; None: all."""
        return -self.window if self.chunked and self.window is not None else self.window

    def constants(self) -> dict[str, object]:
        """The constants that every attention kernel is compiled with."""
        return {
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": self.block_dim,
            "ROTATED_DIM": self.rotated_dim,
            "BLOCK_R": max(triton.next_power_of_2(self.rotated_dim), MIN_PRODUCT) if self.rotated_dim else 0,
            "SCALE": self.scale,
            "CAP": self.cap,
            "WINDOW": self.window_constant,
            "PRODUCT": product_dtype(self.product_dtype),  # the operands of products
        }


@dataclass(frozen=True)
class RaggedRows:
    """A step's B sequences on the device. Sequences that only pad a bucket have no queries and a context of 0."""

    tables: Tensor
    """(R, max_pages) int32: the pages of each row. Entries after the row's context may have any value."""
    rows: Tensor
    """(B,) int32: the row of each sequence."""
    query_starts: Tensor
    """(B + 1,) int32: sequence b has the tokens from ``query_starts[b]`` up to ``query_starts[b + 1]``."""
    contexts: Tensor
    """(B,) int32: the number of each sequence's tokens in pages, including this step's."""

    def __post_init__(self) -> None:
        (num_sequences,) = self.rows.shape
        assert self.query_starts.shape == (num_sequences + 1,)
        assert self.contexts.shape == (num_sequences,)
        assert self.tables.dim() == 2
        for tensor in (self.tables, self.rows, self.query_starts, self.contexts):
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()

    @property
    def num_sequences(self) -> int:
        return int(self.rows.shape[0])


@dataclass(frozen=True)
class PagedKV:
    """A layer's keys and values, with their scales and the attention sinks."""

    pages: Tensor
    """(num_pages, 2, K, 16, D): keys, then values; of latents, (num_pages, 1, 1, 16, D)."""
    key_scales: Tensor
    """(K,) fp32: the factors of stored keys; 1 unless they are fp8."""
    value_scales: Tensor
    sinks: Tensor
    """(H,) fp32: one score per head that takes part in the softmax and has no value; -inf where there is none."""

    def check(self, shape: AttentionShape) -> None:
        heads = shape.num_kv_heads
        assert self.pages.shape[1:] == shape.page_shape, self.pages.shape
        assert self.pages.dtype == shape.kv_dtype
        assert self.key_scales.shape == self.value_scales.shape == (heads,)
        assert self.sinks.shape == (shape.num_heads,)
        for tensor in (self.pages, self.key_scales, self.value_scales, self.sinks):
            assert tensor.is_contiguous()


NUMBERS = ("max_pages", "num_sequences")
"""The arguments of both kernels that are numbers."""


def shared_arguments(shape: AttentionShape) -> dict[str, torch.dtype | str]:
    """The arguments that the decoding and the prefill kernel share."""
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
    """Returns b such that ``starts[b] <= unit < starts[b + 1]``; ``starts`` (num_sequences + 1,) is ascending."""
    found = 0
    for begin in range(0, num_sequences, BLOCK_SEQUENCES):
        at = begin + tl.arange(0, BLOCK_SEQUENCES)
        ends = tl.load(starts + 1 + at, mask=at < num_sequences, other=0x7FFFFFFF)
        found += tl.sum((ends <= unit).to(tl.int32), axis=0)
    return found


@triton.jit
def lowest_seen(position, WINDOW: tl.constexpr):
    """The first position that a query at ``position`` sees. A negative WINDOW is minus the size of chunks."""
    if WINDOW is None:
        return position * 0
    elif WINDOW < 0:
        return position // -WINDOW * -WINDOW
    else:
        return tl.maximum(position - (WINDOW - 1), 0)


@triton.jit
def query_offsets(begin, row, head, num_queries, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr):
    """The rows of a sequence and KV head are all heads of the group for its first query, then those for its second, and
    so on.

    Returns for each row: its query in the sequence, its row in (T * H, D), and whether the query exists.
    """
    index = row // GROUP
    offsets = ((begin + index).to(tl.int64) * NUM_KV_HEADS + head) * GROUP + row % GROUP
    return index, offsets, index < num_queries


@triton.jit
def load_queries(pointers, live, SIZE: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr):
    """Loads rows of SIZE elements, padded to BLOCK, as PRODUCT; 0 where they are not ``live``. In fp16 they are clamped
    to its range."""
    dims = tl.arange(0, BLOCK)
    there = live[:, None] & (dims < SIZE)[None, :]
    queries = tl.load(pointers[:, None] + dims[None, :], mask=there, other=0.0)
    if tl.float16 == PRODUCT:
        queries = tl.minimum(tl.maximum(queries.to(tl.float32), -MAX_FP16), MAX_FP16)
    return queries.to(PRODUCT)


@triton.jit
def load_keys(pointers, inside, MASKED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Loads rows of SIZE elements, padded with 0 to BLOCK. MASKED: those that are not ``inside`` are 0."""
    dims = tl.arange(0, BLOCK)
    at = pointers[:, None] + dims[None, :]
    if MASKED or BLOCK != SIZE:
        there = (dims < SIZE)[None, :]
        if MASKED:
            there &= inside[:, None]
        loaded = tl.load(at, mask=there, other=0.0)
    else:
        loaded = tl.load(at)
    return loaded


@triton.jit
def page_ids(table, start, lowest, end, BLOCK_N: tl.constexpr):
    """The page of each position from ``start`` on; 0 for those below ``lowest`` and from ``end`` on."""
    positions = start + tl.arange(0, BLOCK_N)
    return tl.load(table + positions // SLOTS, mask=(positions >= lowest) & (positions < end), other=0)


@triton.jit
def attend(
    query,
    rotated,
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
    ROTATED_DIM: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the keys and values from ``begin``, a multiple of BLOCK_N, up to ``end`` to the running softmax.

    Keeps for each query: the ``maximum`` of its scores, the ``total`` of exp2(score - maximum), and ``mixed``, the
    values weighted by those. MASKED: some queries do not see all positions in these blocks. Positions below ``lowest``
    and from ``end`` on are not read then, so their contents do not matter. With latent attention, ``rotated`` is the
    rotated part of the queries, (rows, BLOCK_R); None: values are apart.
    """
    BLOCK_D: tl.constexpr = query.shape[1]
    key_dim: tl.constexpr = ROTATED_DIM + HEAD_DIM
    section: tl.constexpr = NUM_KV_HEADS * SLOTS * key_dim
    page_size: tl.constexpr = section if ROTATED_DIM else 2 * section
    pages += head * (SLOTS * key_dim)
    page = page_ids(table, begin, lowest, end, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        slot = page.to(tl.int64) * page_size + positions % SLOTS * key_dim
        # Load the next block's pages early: a load that depends on another load of the same iteration cannot be
        # prefetched.
        page = page_ids(table, start + BLOCK_N, lowest, end, BLOCK_N)
        inside = (positions >= lowest) & (positions < end)
        key = load_keys(pages + slot + ROTATED_DIM, inside, MASKED, HEAD_DIM, BLOCK_D)
        value = key if ROTATED_DIM else load_keys(pages + slot + section, inside, MASKED, HEAD_DIM, BLOCK_D)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="tf32x3")
        if ROTATED_DIM:
            key = load_keys(pages + slot, inside, MASKED, ROTATED_DIM, rotated.shape[1])
            scores = tl.dot(rotated, tl.trans(key.to(query.dtype)), scores, input_precision="tf32x3")
        if CAP is not None:
            # tanh(s / cap), from tanh(x) = 1 - 2 / (exp(2x) + 1), which an infinite exp(2x) leaves at 1
            scores = 1.0 - 2.0 / (tl.exp2(scores * factor) + 1.0)
        if MASKED:
            seen = positions[None, :] <= query_positions[:, None]
            if WINDOW is not None:
                seen &= positions[None, :] >= lowest_seen(query_positions, WINDOW)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        # The remaining factor is applied after the mask, so that each weight is exp2 of one multiply-add, masked or
        # not.
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
    """The factor that turns a product of query and key into a score in log2, or into the 2x of the cap's exp(2x)."""
    if CAP is None:
        return key_scale * (SCALE * LOG2E)
    else:
        return key_scale * (SCALE * 2.0 * LOG2E / CAP)


@triton.jit
def final_weight(maximum, total, sink):
    """The final factor of the mixed values: 1 / total, including the sink; 0 if nothing was seen."""
    raised = tl.maximum(maximum, sink * LOG2E)
    base = tl.where(raised == float("-inf"), 0.0, raised)
    kept = tl.exp2(maximum - base)
    divisor = total * kept + tl.exp2(sink * LOG2E - base)
    return kept / tl.where(divisor > 0.0, divisor, 1.0)

"""Fuses the steps between the QKV product and attention: the norm of each head, the rotary embedding, and the write to
KV pages. A program computes some heads of one token: queries, or keys and their values."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import await_inputs, check, load_wide, narrowed, num_warps, rounded
from penstock.kernels.cuda.core.launch import KernelVariant

BLOCK = 1024
"""Elements per program, over all its heads."""


@triton.jit
def _turn_heads(
    source,
    cosines,
    sines,
    out,
    OUT_STRIDE: tl.constexpr,
    heads,
    inside,
    weight,
    scale,
    EPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Normalises, rotates and stores heads: from adjacent heads in ``source`` to heads ``OUT_STRIDE`` apart. Cosines
    and sines are those of one position."""
    pairs = tl.arange(0, BLOCK_PAIRS)
    paired = pairs < PAIRS
    both = inside[:, None] & paired[None, :]
    head = source + heads[:, None] * HEAD_DIM
    low = load_wide(head + pairs[None, :], both)
    high = load_wide(head + PAIRS + pairs[None, :], both)
    # The dimensions after the rotated ones.
    beyond = 2 * PAIRS + tl.arange(0, BLOCK_REST)
    left = inside[:, None] & (beyond < HEAD_DIM)[None, :]
    if BLOCK_REST > 1:
        rest = load_wide(head + beyond[None, :], left)
    if weight is not None:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        if BLOCK_REST > 1:
            squares += tl.sum(rest * rest, axis=1)
            rest_weight = tl.load(weight + beyond, mask=beyond < HEAD_DIM, other=0.0)
        norm = tl.rsqrt(squares / HEAD_DIM + EPS)[:, None]
        low_weight = tl.load(weight + pairs, mask=paired, other=0.0)
        high_weight = tl.load(weight + PAIRS + pairs, mask=paired, other=0.0)
        low = rounded(low * norm * low_weight[None, :], source)
        high = rounded(high * norm * high_weight[None, :], source)
        if BLOCK_REST > 1:
            rest = rounded(rest * norm * rest_weight[None, :], source)
    cos = tl.load(cosines + pairs, mask=paired, other=0.0)[None, :]
    sin = tl.load(sines + pairs, mask=paired, other=0.0)[None, :]
    to = out + heads[:, None] * OUT_STRIDE
    tl.store(to + pairs[None, :], narrowed(low * cos - high * sin, scale, out), mask=both)
    tl.store(to + PAIRS + pairs[None, :], narrowed(high * cos + low * sin, scale, out), mask=both)
    if BLOCK_REST > 1:
        tl.store(to + beyond[None, :], narrowed(rest, scale, out), mask=left)


@triton.jit
def _rope_kv(
    qkv,
    cosines,
    sines,
    positions,
    slots,
    query,
    pages,
    query_weight,
    key_weight,
    key_scales,
    value_scales,
    EPS: tl.constexpr,
    VALUE_EPS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROW_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PDL: tl.constexpr,
):
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    query_blocks: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    row = qkv + token * ROW_HEADS * HEAD_DIM
    position = tl.load(positions + token).to(tl.int64)
    cos = cosines + position * PAIRS
    sin = sines + position * PAIRS
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    if tl.program_id(1) < query_blocks:
        _turn_heads(
            row, cos, sin, query + token * HEADS * HEAD_DIM, HEAD_DIM, heads, heads < HEADS, query_weight, None,
            EPS, HEAD_DIM, PAIRS, BLOCK_PAIRS, BLOCK_REST,
        )  # fmt: skip
    elif KV_HEADS > 0:
        heads -= query_blocks * BLOCK_HEADS
        slot = tl.load(slots + token)
        # A single comparison, since Triton 3.9's interpreter cannot combine a vector mask with a scalar one.
        inside = heads < tl.where(slot >= 0, KV_HEADS, 0)
        page = pages + (slot // SLOTS) * (2 * KV_HEADS * SLOTS * HEAD_DIM) + (slot % SLOTS) * HEAD_DIM
        key_scale = None
        value_scale = None
        if key_scales is not None:
            key_scale = tl.load(key_scales + heads, mask=inside, other=1.0)[:, None]
            value_scale = tl.load(value_scales + heads, mask=inside, other=1.0)[:, None]
        _turn_heads(
            row + HEADS * HEAD_DIM, cos, sin, page, SLOTS * HEAD_DIM, heads, inside, key_weight, key_scale,
            EPS, HEAD_DIM, PAIRS, BLOCK_PAIRS, BLOCK_REST,
        )  # fmt: skip
        dims = tl.arange(0, BLOCK_DIM)[None, :]
        both = inside[:, None] & (dims < HEAD_DIM)
        value = load_wide(row + (ROW_HEADS - KV_HEADS) * HEAD_DIM + heads[:, None] * HEAD_DIM + dims, both)
        if VALUE_EPS is not None:
            norm = tl.rsqrt(tl.sum(value * value, axis=1) / HEAD_DIM + VALUE_EPS)
            value = rounded(value * norm[:, None], qkv)
        tl.store(
            page + (KV_HEADS + heads[:, None]) * (SLOTS * HEAD_DIM) + dims,
            narrowed(value, value_scale, pages),
            mask=both,
        )


@dataclass(frozen=True)
class RopeKv:
    """The properties of a model that ``rope_kv`` is compiled for."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    """The model's dtype, or float8_e4m3fn."""
    num_heads: int
    num_kv_heads: int
    """0: the layer has no keys of its own."""
    head_dim: int
    rotary_dim: int
    slots: int
    """Slots per page."""
    norm_eps: float | None
    """The epsilon of the norm of each head; None: heads are not normalised."""
    value_eps: float | None = None
    """The same for values, whose norm has no weight."""
    values_are_keys: bool = False
    """Whether values are the keys before norm and rotation."""

    @property
    def row_heads(self) -> int:
        """The heads in a row of queries, keys and values."""
        return self.num_heads + (1 if self.values_are_keys else 2) * self.num_kv_heads


@cache
def rope_kv_variant(made: RopeKv) -> KernelVariant:
    """The variant of ``rope_kv`` for a model."""
    assert made.rotary_dim % 2 == 0, made.rotary_dim
    block_dim = triton.next_power_of_2(made.head_dim)
    block_heads = min(max(BLOCK // block_dim, 1), triton.next_power_of_2(made.num_heads))
    norm_weights = None if made.norm_eps is None else torch.float32
    has_scales = made.kv_dtype == torch.float8_e4m3fn and made.num_kv_heads > 0
    kv_scales = torch.float32 if has_scales else None
    arguments = {
        "qkv": made.dtype,
        "cosines": torch.float32,
        "sines": torch.float32,
        "positions": torch.int32,
        "slots": torch.int64,
        "query": made.dtype,
        "pages": made.kv_dtype if made.num_kv_heads else None,
        **dict.fromkeys(("query_weight", "key_weight"), norm_weights),
        **dict.fromkeys(("key_scales", "value_scales"), kv_scales),
    }
    constants = {
        "EPS": made.norm_eps,
        "VALUE_EPS": made.value_eps,
        "HEADS": made.num_heads,
        "KV_HEADS": made.num_kv_heads,
        "ROW_HEADS": made.row_heads,
        "HEAD_DIM": made.head_dim,
        "PAIRS": made.rotary_dim // 2,
        "SLOTS": made.slots,
        "BLOCK_HEADS": block_heads,
        "BLOCK_DIM": block_dim,
        "BLOCK_PAIRS": triton.next_power_of_2(made.rotary_dim // 2),
        "BLOCK_REST": triton.next_power_of_2(max(made.head_dim - made.rotary_dim, 1)),
    }
    return KernelVariant(_rope_kv, arguments, constants, num_warps=num_warps(block_heads * block_dim))


def rope_kv(
    qkv: Tensor,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor,
    slots: Tensor,
    query: Tensor,
    pages: Tensor | None,
    *,
    norm: tuple[Tensor, Tensor, float] | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    value_eps: float | None = None,
    values_are_keys: bool = False,
) -> None:
    """Normalises and rotates queries and keys of T tokens; queries go to ``query``, keys and values to their slots.

    ``qkv`` is (T, (H + 2K) D): query heads, key heads, value heads. In each head, the pairs (i, i + N) of the first 2N
    dimensions are rotated by the angle whose cosine and sine are ``cosines[p, i]`` and ``sines[p, i]``, both (P, N) in
    fp32, where p is the token's entry in ``positions`` (T,) int32. ``query`` is (T, H, D) of the dtype of ``qkv``.
    ``pages`` is (pages, 2, K, S, D), keys before values, of that dtype or float8_e4m3fn. ``slots`` is (T,) int64: token
    t is stored in slot ``slots[t] % S`` of page ``slots[t] // S``, or not at all if ``slots[t]`` is negative.

    ``norm`` has the weights of queries and keys, both (D,) in fp32, and eps: each head is normalised (RMS) before it is
    rotated. ``scales``, only for fp8, has the scales of keys and values, both (K,) in fp32; keys and values are divided
    by them before they are stored. ``value_eps``: each value head is normalised too, without a weight.
    ``values_are_keys``: ``qkv`` is (T, (H + K) D), and values are the keys as they are there. Without ``pages`` there
    are only queries, ``qkv`` is (T, H D), and ``slots`` is not read.
    """
    tokens, heads, head_dim = query.shape
    num_pages, _, kv_heads, page_slots, _ = (0, 2, 0, 1, head_dim) if pages is None else pages.shape
    num_positions, pairs = cosines.shape
    made = RopeKv(
        qkv.dtype,
        qkv.dtype if pages is None else pages.dtype,
        heads,
        kv_heads,
        head_dim,
        2 * pairs,
        page_slots,
        None if norm is None else norm[2],
        value_eps,
        values_are_keys,
    )
    check(qkv, (tokens, made.row_heads * head_dim), qkv.dtype)
    check(query, query.shape, qkv.dtype)
    if pages is not None:
        check(pages, (num_pages, 2, kv_heads, page_slots, head_dim), pages.dtype)
    for table in (cosines, sines):
        check(table, (num_positions, pairs), torch.float32)
    check(positions, (tokens,), torch.int32)
    check(slots, (tokens,), torch.int64)
    assert (scales is not None) == (made.kv_dtype == torch.float8_e4m3fn), made.kv_dtype
    for weight in norm[:2] if norm is not None else ():
        check(weight, (head_dim,), torch.float32)
    for scale in scales or ():
        check(scale, (kv_heads,), torch.float32)
    variant = rope_kv_variant(made)
    grid = (tokens, sum(triton.cdiv(count, variant.constants["BLOCK_HEADS"]) for count in (heads, kv_heads)))
    weights = (None, None) if norm is None else norm[:2]
    variant.launch(grid, qkv, cosines, sines, positions, slots, query, pages, *weights, *(scales or (None, None)))

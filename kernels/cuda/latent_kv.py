"""Fuses the steps between the first products of latent attention and the attention itself: rotates queries and the
cached vector, normalises the latent, and writes the vector to its page. A program computes some heads of one token, or
its cached vector."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import await_inputs, check, load_wide, num_warps
from penstock.kernels.cuda.core.launch import KernelVariant

BLOCK = 1024
"""Elements per program, over all its heads."""


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """The sizes of latent attention, by their names in configs."""

    q_lora_rank: int | None
    """The size of the latent that queries are computed from; None: they are computed from the hidden state."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6
    """The epsilon of the latents' norms."""

    @property
    def qk_head_dim(self) -> int:
        """The size of a head's queries."""
        return self.qk_rope_head_dim + self.qk_nope_head_dim

    @property
    def cached_dim(self) -> int:
        """The size of the cached vector."""
        return self.qk_rope_head_dim + self.kv_lora_rank

    def first_rows(self, num_heads: int) -> int:
        """The rows of the first product: the cached vector, then queries or their latent."""
        return self.cached_dim + (num_heads * self.qk_head_dim if self.q_lora_rank is None else self.q_lora_rank)

    def products(self, num_heads: int, hidden_size: int) -> list[tuple[int, int]]:
        """The matrix products of a layer's attention, each as outputs and inputs, the last one that of its output."""
        queries = [] if self.q_lora_rank is None else [(num_heads * self.qk_head_dim, self.q_lora_rank)]
        first, last = (self.first_rows(num_heads), hidden_size), (hidden_size, num_heads * self.v_head_dim)
        return [first, *queries, last]


@triton.jit
def _rotate(source, out, mask, cos, sin, PAIRS: tl.constexpr):
    """Rotates the pairs (i, i + PAIRS): from pointers to the first element of each to others."""
    low = load_wide(source, mask)
    high = load_wide(source + PAIRS, mask)
    tl.store(out, (low * cos - high * sin).to(out.dtype.element_ty), mask=mask)
    tl.store(out + PAIRS, (high * cos + low * sin).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _latent_kv(
    cached,
    queries,
    cosines,
    sines,
    positions,
    slots,
    weight,
    query,
    pages,
    CACHED_STRIDE: tl.constexpr,
    QUERIES_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    QUERY_DIM: tl.constexpr,
    RANK: tl.constexpr,
    PAIRS: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The programs of a token are those of its heads, then that of its cached vector."""
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    pairs = tl.arange(0, BLOCK_PAIRS)
    paired = pairs < PAIRS
    cos = tl.load(cosines + position * PAIRS + pairs, mask=paired, other=0.0)
    sin = tl.load(sines + position * PAIRS + pairs, mask=paired, other=0.0)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    if tl.program_id(1) * BLOCK_HEADS < HEADS:
        of_heads = queries + token * QUERIES_STRIDE + heads * QUERY_DIM
        rotated = query + (token * HEADS + heads) * (2 * PAIRS + RANK)
        both = (heads < HEADS)[:, None] & paired[None, :]
        _rotate(
            of_heads[:, None] + pairs[None, :], rotated[:, None] + pairs[None, :], both, cos[None, :], sin[None, :],
            PAIRS,
        )  # fmt: skip
    else:
        slot = tl.load(slots + token)
        # A single comparison, since Triton 3.9's interpreter cannot combine a vector mask with a scalar one.
        source = cached + token * CACHED_STRIDE
        to = pages + slot * (2 * PAIRS + RANK)
        _rotate(source + pairs, to + pairs, pairs < tl.where(slot >= 0, PAIRS, 0), cos, sin, PAIRS)
        columns = tl.arange(0, BLOCK_RANK)
        inside = columns < RANK
        latent = load_wide(source + 2 * PAIRS + columns, inside)
        scale = tl.rsqrt(tl.sum(latent * latent, axis=0) / RANK + EPS)
        normed = latent * scale * tl.load(weight + columns, mask=inside, other=0.0)
        kept = columns < tl.where(slot >= 0, RANK, 0)
        tl.store(to + 2 * PAIRS + columns, normed.to(pages.dtype.element_ty), mask=kept)


@cache
def latent_kv_variant(
    latent: LatentShape, dtype: torch.dtype, num_heads: int, cached_stride: int, queries_stride: int
) -> KernelVariant:
    """The variant of ``latent_kv`` for a model, and for rows that are ``cached_stride`` and ``queries_stride`` elements
    apart."""
    block_pairs = triton.next_power_of_2(latent.qk_rope_head_dim // 2)
    block_heads = min(max(BLOCK // (2 * block_pairs), 1), triton.next_power_of_2(num_heads))
    block_rank = triton.next_power_of_2(latent.kv_lora_rank)
    arguments = {
        "cached": dtype,
        "queries": dtype,
        "cosines": torch.float32,
        "sines": torch.float32,
        "positions": torch.int32,
        "slots": torch.int64,
        "weight": torch.float32,
        "query": dtype,
        "pages": dtype,
    }
    constants = {
        "CACHED_STRIDE": cached_stride,
        "QUERIES_STRIDE": queries_stride,
        "HEADS": num_heads,
        "QUERY_DIM": latent.qk_head_dim,
        "RANK": latent.kv_lora_rank,
        "PAIRS": latent.qk_rope_head_dim // 2,
        "EPS": latent.norm_eps,
        "BLOCK_HEADS": block_heads,
        "BLOCK_PAIRS": block_pairs,
        "BLOCK_RANK": block_rank,
    }
    elements = max(2 * block_heads * block_pairs, block_rank)
    return KernelVariant(_latent_kv, arguments, constants, num_warps=num_warps(elements))


def latent_kv(
    latent: LatentShape,
    cached: Tensor,
    queries: Tensor,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor,
    slots: Tensor,
    weight: Tensor,
    query: Tensor,
    pages: Tensor,
) -> None:
    """Rotates the first R = ``qk_rope_head_dim`` dimensions of T tokens' queries and cached vectors, normalises (RMS)
    the others of cached vectors, and stores these in their slots.

    ``cached`` (T, R + N), with N = ``kv_lora_rank``, and ``queries`` (T, H * (R + ``qk_nope_head_dim``)) may be slices
    of wider rows. The rotated queries go to the first R dimensions of ``query`` (T, H, R + N), whose others stay as
    they are. The pairs, ``cosines``, ``sines``, ``positions`` and ``slots`` are those of ``rope_kv``. ``weight`` is
    (N,) in fp32. ``pages`` is (pages, 1, 1, S, R + N), in the dtype of the others.
    """
    tokens, heads, _ = query.shape
    num_positions, pairs = cosines.shape
    assert 2 * pairs == latent.qk_rope_head_dim, pairs
    check(query, (tokens, heads, latent.cached_dim), query.dtype)
    check(pages, (len(pages), 1, 1, pages.shape[3], latent.cached_dim), query.dtype)
    assert cached.shape == (tokens, latent.cached_dim), cached.shape
    assert queries.shape == (tokens, heads * latent.qk_head_dim), queries.shape
    assert cached.stride(1) == queries.stride(1) == 1
    for table in (cosines, sines):
        check(table, (num_positions, pairs), torch.float32)
    check(positions, (tokens,), torch.int32)
    check(slots, (tokens,), torch.int64)
    check(weight, (latent.kv_lora_rank,), torch.float32)
    variant = latent_kv_variant(latent, query.dtype, heads, cached.stride(0), queries.stride(0))
    grid = (tokens, triton.cdiv(heads, variant.constants["BLOCK_HEADS"]) + 1)
    variant.launch(grid, cached, queries, cosines, sines, positions, slots, weight, query, pages)

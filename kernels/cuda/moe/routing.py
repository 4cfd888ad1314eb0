"""Routing: chooses each token's experts and groups the pairs of tokens and experts by expert.

Tokens are processed in blocks. The first kernel chooses each token's experts, and counts for each block how many of its
tokens chose each expert. In the second, every block sums the counts of all blocks to find where its own pairs begin in
each expert's group. So pairs are in the order of tokens, whatever order blocks are computed in. If one block has all
tokens, the first kernel groups them as well.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import await_inputs, check, load_wide, num_warps, order_of, value_of
from penstock.kernels.cuda.core.launch import KernelVariant
from penstock.kernels.cuda.model_shapes import Mixture
from penstock.kernels.cuda.moe.shapes import ExpertsShape

GROUPED = ("pairs", "tiles", "num_tiles")
"""The fields of ``Routes`` that describe the grouped pairs, as kernel arguments."""
MAX_BLOCK_TOKENS = 32
BLOCK_COUNTS = 4096
"""Counts, or comparisons of a tile with an expert, that a program processes at once."""
TAKEN = tl.constexpr(-(1 << 63))
"""The rank of an expert that does not exist or is chosen already: below all others."""


@dataclass(frozen=True)
class Routes:
    """The input of the products: the P = T * k pairs of T tokens, in the order of tokens, each with its experts from
    the likeliest on. The tensors may have room for more."""

    ids: Tensor
    """(T, k) int32: the expert of each pair; -1 for padding tokens."""
    weights: Tensor
    """(T, k) fp32: the factor of the pair's result."""
    counts: Tensor
    """(blocks of tokens, experts rounded up to a power of 2) int32: how many tokens chose an expert."""
    pairs: Tensor
    """(P,) int32: the pairs by expert, and those of an expert in the order of tokens."""
    tiles: Tensor
    """(tiles, 3) int32: a tile's expert, the index of its first pair in ``pairs``, and the end of its expert's pairs,
    which may include further tiles."""
    num_tiles: Tensor
    """(1,) int32."""

    @classmethod
    def allocate(cls, shape: ExpertsShape, max_tokens: int, device: torch.device) -> "Routes":
        """Allocates room for steps of up to ``max_tokens`` tokens."""

        def ints(*sizes: int) -> Tensor:
            return torch.empty(sizes, dtype=torch.int32, device=device)

        places = (max_tokens, shape.mixture.per_token)
        max_tiles = max(shape.max_tiles(max_tokens, tiles.block_m) for tiles in shape.all_tiles)
        return cls(
            ids=ints(*places),
            weights=torch.empty(places, dtype=torch.float32, device=device),
            counts=ints(triton.cdiv(max_tokens, _block_tokens(shape.block_experts)), shape.block_experts),
            pairs=ints(shape.num_pairs(max_tokens)),
            tiles=ints(max_tiles, 3),
            num_tiles=ints(1),
        )

    @property
    def grouped(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that ``GROUPED`` names."""
        return self.pairs, self.tiles, self.num_tiles


@triton.jit
def _group(
    pair,
    totals,
    before,
    block,
    num_blocks,
    pairs,
    tiles,
    num_tiles,
    block_m,
    BLOCK_ROWS: tl.constexpr,
):
    """Writes the pairs of a block of tokens and the block's share of the tiles, BLOCK_ROWS at a time.

    ``pair`` (tokens, experts) is a pair's number, or negative where a token did not choose an expert; ``totals``
    (experts,) counts the pairs of all blocks, and ``before`` those of the blocks before this one.
    """
    ends = tl.cumsum(totals, axis=0)
    position = (ends - totals + before - 1)[None, :] + tl.cumsum((pair >= 0).to(tl.int32), axis=0)
    tl.store(pairs + position, pair, mask=pair >= 0)

    last_tiles = tl.cumsum(tl.cdiv(totals, block_m), axis=0)
    made = tl.max(last_tiles, axis=0)
    tl.store(num_tiles, made, mask=block == 0)
    for first in range(block * BLOCK_ROWS, made, num_blocks * BLOCK_ROWS):
        tile = first + tl.arange(0, BLOCK_ROWS)
        # A tile's expert is the number of experts whose tiles end at or before the tile.
        passed = last_tiles[None, :] <= tile[:, None]
        within = tile - tl.max(tl.where(passed, last_tiles[None, :], 0), axis=1)
        begin = tl.max(tl.where(passed, ends[None, :], 0), axis=1) + within * block_m
        end = tl.min(tl.where(passed, 0x7FFFFFFF, ends[None, :]), axis=1)
        tl.store(tiles + 3 * tile, tl.sum(passed.to(tl.int32), axis=1), mask=tile < made)
        tl.store(tiles + 3 * tile + 1, begin, mask=tile < made)
        tl.store(tiles + 3 * tile + 2, end, mask=tile < made)


NUMBERS = ("num_tokens", "num_sequences", "block_m")


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=NUMBERS)
def route_kernel(
    logits,
    query_starts,
    ids,
    weights,
    counts,
    pairs,
    tiles,
    num_tiles,
    num_tokens,
    num_sequences,
    block_m,
    NUM_EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program chooses the experts of a block of tokens, and groups their pairs if it is the only program. That is
    decided at run time, so that the weights are bitwise the same in both cases."""
    await_inputs(PDL)
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    experts = tl.arange(0, BLOCK_EXPERTS)
    places = tl.arange(0, BLOCK_PLACES)
    live = tokens < tl.minimum(num_tokens, tl.load(query_starts + num_sequences))
    there = live[:, None] & (experts < NUM_EXPERTS)[None, :]
    score = load_wide(logits + tokens.to(tl.int64)[:, None] * NUM_EXPERTS + experts[None, :], there)
    score = tl.where(score == score, score, float("inf"))  # makes all the token's weights NaN
    # Ranked by score, and among equal scores by number, lowest first.
    rank = (order_of(score).to(tl.int64) << 32) | (BLOCK_EXPERTS - 1 - experts)[None, :]
    rank = tl.where(there, rank, TAKEN)
    chosen = tl.full((BLOCK_TOKENS, BLOCK_PLACES), TAKEN, tl.int64)
    pair = tl.full((BLOCK_TOKENS, BLOCK_EXPERTS), -1, tl.int32)
    for place in tl.static_range(PER_TOKEN):
        best = tl.max(rank, axis=1)[:, None]
        chosen = tl.where(places[None, :] == place, best, chosen)
        pair = tl.where(there & (rank == best), tokens[:, None] * PER_TOKEN + place, pair)
        rank = tl.where(rank == best, TAKEN, rank)

    count = tl.sum((pair >= 0).to(tl.int32), axis=0)
    if tl.num_programs(0) == 1:
        none = tl.zeros_like(count)
        _group(pair, count, none, 0, 1, pairs, tiles, num_tiles, block_m, BLOCK_ROWS)
    else:
        tl.store(counts + tl.program_id(0) * BLOCK_EXPERTS + experts, count)
    held = live[:, None] & (places < PER_TOKEN)[None, :]
    value = value_of((chosen >> 32).to(tl.int32))
    top = tl.max(tl.where(held, value, float("-inf")), axis=1)
    top = tl.where(live, top, 0.0)[:, None]
    weight = tl.where(held, tl.exp(value - top), 0.0)
    if NORMALISE:
        total = tl.sum(weight, axis=1)
    else:
        total = tl.sum(tl.where(there, tl.exp(score - top), 0.0), axis=1)
    total = tl.where(live, total, 1.0)[:, None]
    expert = tl.where(held, BLOCK_EXPERTS - 1 - (chosen & 0xFFFFFFFF).to(tl.int32), -1)
    at = tokens[:, None] * PER_TOKEN + places[None, :]
    stored = (tokens < num_tokens)[:, None] & (places < PER_TOKEN)[None, :]
    tl.store(ids + at, expert, mask=stored)
    tl.store(weights + at, weight / total, mask=stored)


NUMBERS_OF_GROUPING = ("num_tokens", "block_m")


@triton.jit(do_not_specialize=NUMBERS_OF_GROUPING, do_not_specialize_on_alignment=NUMBERS_OF_GROUPING)
def group_kernel(
    ids,
    counts,
    pairs,
    tiles,
    num_tiles,
    num_tokens,
    block_m,
    PER_TOKEN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program groups the pairs of a block of tokens. It reads the counts of BLOCK_ROWS blocks at once."""
    await_inputs(PDL)
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, BLOCK_EXPERTS)
    totals = tl.zeros((BLOCK_EXPERTS,), tl.int32)
    before = tl.zeros((BLOCK_EXPERTS,), tl.int32)
    for first in range(0, num_blocks, BLOCK_ROWS):
        at = (first + tl.arange(0, BLOCK_ROWS))[:, None]
        count = tl.load(counts + at * BLOCK_EXPERTS + experts[None, :], mask=at < num_blocks, other=0)
        totals += tl.sum(count, axis=0)
        before += tl.sum(tl.where(at < block, count, 0), axis=0)

    tokens = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    pair = tl.full((BLOCK_TOKENS, BLOCK_EXPERTS), -1, tl.int32)
    for place in tl.static_range(PER_TOKEN):
        own = tokens * PER_TOKEN + place
        here = tl.load(ids + own, mask=tokens < num_tokens, other=-1)[:, None] == experts[None, :]
        pair = tl.where(here, own[:, None], pair)
    _group(pair, totals, before, block, num_blocks, pairs, tiles, num_tiles, block_m, BLOCK_ROWS)


def _block_tokens(block_experts: int) -> int:
    """Returns the tokens of a program, fewer with many experts, so that registers suffice."""
    return min(MAX_BLOCK_TOKENS, 2 * BLOCK_COUNTS // block_experts)


@cache
def route_variant(mixture: Mixture, dtype: torch.dtype) -> KernelVariant:
    """The variant of the first kernel for logits of a dtype."""
    block_experts = triton.next_power_of_2(mixture.num_experts)
    return KernelVariant(
        route_kernel,
        {
            "logits": dtype,
            "query_starts": torch.int32,
            "ids": torch.int32,
            "weights": torch.float32,
            **dict.fromkeys(("counts", *GROUPED), torch.int32),
            **dict.fromkeys(NUMBERS, "i32"),
        },
        {
            "NUM_EXPERTS": mixture.num_experts,
            "PER_TOKEN": mixture.per_token,
            "NORMALISE": mixture.normalise,
            "BLOCK_TOKENS": _block_tokens(block_experts),
            "BLOCK_EXPERTS": block_experts,
            "BLOCK_PLACES": triton.next_power_of_2(mixture.per_token),
            "BLOCK_ROWS": BLOCK_COUNTS // block_experts,
        },
        num_warps=num_warps(BLOCK_COUNTS),
    )


@cache
def group_variant(num_experts: int, per_token: int) -> KernelVariant:
    """The variant of the second kernel."""
    block_experts = triton.next_power_of_2(num_experts)
    return KernelVariant(
        group_kernel,
        {**dict.fromkeys(("ids", "counts", *GROUPED), torch.int32), **dict.fromkeys(NUMBERS_OF_GROUPING, "i32")},
        {
            "PER_TOKEN": per_token,
            "BLOCK_TOKENS": _block_tokens(block_experts),
            "BLOCK_EXPERTS": block_experts,
            "BLOCK_ROWS": BLOCK_COUNTS // block_experts,
        },
        num_warps=num_warps(BLOCK_COUNTS),
    )


def route(mixture: Mixture, block_m: int, logits: Tensor, query_starts: Tensor, routes: Routes) -> None:
    """Chooses the experts of the first n of T tokens by the router's ``logits`` (T, E), and groups the pairs into tiles
    of up to ``block_m``.

    ``query_starts`` (B + 1,) int32 ends with n. A token's experts are those with the largest logits; ties go to the
    lowest number. Their weights are a softmax over all logits, divided by the sum of the chosen ones if the mixture
    normalises them.
    """
    num_tokens = logits.shape[0]
    num_sequences = query_starts.shape[0] - 1
    check(logits, (num_tokens, mixture.num_experts), logits.dtype)
    check(query_starts, (num_sequences + 1,), torch.int32)
    assert routes.ids.shape[0] >= num_tokens
    assert routes.ids.shape[1] == mixture.per_token
    route = route_variant(mixture, logits.dtype)
    num_blocks = triton.cdiv(num_tokens, route.constants["BLOCK_TOKENS"])
    route.launch(
        (num_blocks,),
        logits=logits,
        query_starts=query_starts,
        **vars(routes),
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        block_m=block_m,
    )
    if num_blocks > 1:
        variant = group_variant(mixture.num_experts, mixture.per_token)
        variant.launch((num_blocks,), routes.ids, routes.counts, *routes.grouped, num_tokens, block_m)


def expert_ends(mixture: Mixture, routes: Routes, num_tokens: int) -> Tensor:
    """Returns the end of each expert's pairs in ``routes.pairs``, (E,) int32. ``route`` has filled the routes, with so
    many tokens that it needed two kernels."""
    block_tokens = _block_tokens(int(triton.next_power_of_2(mixture.num_experts)))
    assert num_tokens > block_tokens, num_tokens
    counts = routes.counts[: triton.cdiv(num_tokens, block_tokens), : mixture.num_experts]
    return counts.sum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)

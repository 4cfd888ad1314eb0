"""Log-probabilities of the chosen token and of the likeliest ones, from the model's unmodified logits."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import check, order_of, value_of
from penstock.kernels.cuda.core.launch import KernelVariant
from penstock.kernels.cuda.sampling.tensors import SamplerShape

MAX_TOP = 20
"""The maximum number of likeliest tokens per sampled position."""
BLOCK_TOP = tl.constexpr(32)
"""The same, rounded up to a power of 2."""
TAKEN = tl.constexpr(-(1 << 31))
"""Marks an entry that is taken: less than every value of ``order_of``."""


WORKSPACE: dict[str, tuple[torch.dtype, *tuple[int, ...]]] = {
    # The largest logit; NaN counts as infinite.
    "bests": (torch.float32,),
    # The sum of e^(x - best).
    "sums": (torch.float32,),
    # The largest logits, mapped to integers of the same order, and their tokens.
    "orders": (torch.int32, MAX_TOP),
    "ids": (torch.int32, MAX_TOP),
}
"""The kernels' intermediate results, by name: their types, and their sizes per sampled position and slice."""


@triton.jit
def _rank(
    logits,
    num_lines,
    num_top,
    bests,
    sums,
    orders,
    ids,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    SLICE: tl.constexpr,
    MAX_TOP: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if line >= tl.load(num_lines):
        return
    wanted = tl.load(num_top + line)
    if wanted < 0:
        return
    at = line * ((VOCAB + SLICE - 1) // SLICE) + part
    lanes = tl.arange(0, SLICE)
    own = part * SLICE + lanes
    x = tl.load(logits + line * STRIDE + own, mask=own < VOCAB, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    best = tl.max(x, axis=0)
    tl.store(bests + at, best)
    # The sum is not used if the best logit is infinite.
    base = tl.where((best > -float("inf")) & (best < float("inf")), best, 0.0)
    tl.store(sums + at, tl.sum(tl.exp(tl.minimum(x - base, 0.0)), axis=0))
    order = tl.where(own < VOCAB, order_of(x), TAKEN)
    taken = 0
    while taken < wanted:
        largest, first = tl.max(order, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(orders + at * MAX_TOP + taken, largest)
        tl.store(ids + at * MAX_TOP + taken, part * SLICE + first)
        order = tl.where(lanes == first, TAKEN, order)
        taken += 1


@triton.jit
def _gather(
    logits,
    num_lines,
    num_top,
    token_ids,
    bests,
    sums,
    orders,
    ids,
    chosen,
    top_ids,
    top,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    MAX_TOP: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    if line >= tl.load(num_lines):
        return
    wanted = tl.load(num_top + line)
    if wanted < 0:
        return
    BLOCK_SLICES: tl.constexpr = triton.next_power_of_2(SLICES)
    parts = tl.arange(0, BLOCK_SLICES)
    inside = parts < SLICES
    slice_best = tl.load(bests + line * SLICES + parts, mask=inside, other=-float("inf"))
    best = tl.max(slice_best, axis=0)
    whole = (best > -float("inf")) & (best < float("inf"))
    base = tl.where(whole, best, 0.0)
    weights = tl.exp(tl.minimum(slice_best - base, 0.0).to(tl.float64))
    mass = tl.sum(tl.load(sums + line * SLICES + parts, mask=inside, other=0.0).to(tl.float64) * weights, axis=0)
    # All results are NaN if the best logit is not finite.
    log_sum = tl.where(whole, tl.log(tl.where(whole, mass, 1.0)), float("nan"))
    base = base.to(tl.float64)
    token = tl.load(token_ids + line)
    x = tl.load(logits + line * STRIDE + token).to(tl.float64)
    tl.store(chosen + line, (x - base - log_sum).to(tl.float32))

    flat = tl.arange(0, BLOCK_SLICES * BLOCK_TOP)
    place, rank = flat // BLOCK_TOP, flat % BLOCK_TOP
    there = (place < SLICES) & (rank < wanted)
    source = (line * SLICES + place) * MAX_TOP + rank
    order = tl.load(orders + source, mask=there, other=TAKEN)
    taken = 0
    while taken < wanted:
        largest, first = tl.max(order, axis=0, return_indices=True, return_indices_tie_break_left=True)
        at = (line * SLICES + first // BLOCK_TOP) * MAX_TOP + first % BLOCK_TOP
        value = value_of(largest).to(tl.float64)
        tl.store(top_ids + line * MAX_TOP + taken, tl.where(whole, tl.load(ids + at), taken))
        tl.store(top + line * MAX_TOP + taken, (value - base - log_sum).to(tl.float32))
        order = tl.where(flat == first, TAKEN, order)
        taken += 1


ARGUMENTS = {
    "num_lines": torch.int32,
    "num_top": torch.int32,
    "token_ids": torch.int32,
    **{name: kind for name, (kind, *_) in WORKSPACE.items()},
    "chosen": torch.float32,
    "top_ids": torch.int32,
    "top": torch.float32,
}
"""The types of the kernels' arguments, except logits."""


@cache
def logprobs_variants(shape: SamplerShape) -> tuple[KernelVariant, KernelVariant]:
    """The variants of the two kernels: one ranks the tokens of each slice, the other those of all slices."""
    constants = {"VOCAB": shape.vocab_size, "STRIDE": shape.stride, "SLICE": shape.slice, "MAX_TOP": MAX_TOP}
    partial = {name: ARGUMENTS[name] for name in ("num_lines", "num_top", *WORKSPACE)}
    logits = {"logits": shape.dtype}
    return (
        KernelVariant(_rank, logits | partial, constants, num_warps=shape.num_warps),
        KernelVariant(_gather, logits | ARGUMENTS, {**constants, "SLICES": shape.slices}, num_warps=8),
    )


def make_logprobs_workspace(shape: SamplerShape, num_lines: int, device: torch.device) -> dict[str, Tensor]:
    """Allocates a ``WORKSPACE`` for ``num_lines`` sampled positions."""
    return {
        name: torch.empty(num_lines, shape.slices, *sizes, dtype=kind, device=device)
        for name, (kind, *sizes) in WORKSPACE.items()
    }


def logprobs(
    shape: SamplerShape,
    logits: Tensor,
    num_lines: Tensor,
    num_top: Tensor,
    token_ids: Tensor,
    room: dict[str, Tensor],
    chosen: Tensor,
    top_ids: Tensor,
    top: Tensor,
) -> None:
    """Computes x - ln sum e^x over the first V entries of each row of ``logits`` (N, stride). Only the first
    ``num_lines`` (1,) int32 rows are used. ``room`` is a ``WORKSPACE``.

    ``num_top`` (N,) int32 is negative for a sampled position that needs no log-probabilities. For the others,
    ``chosen`` (N,) float32 receives the log-probability of the position's token in ``token_ids`` (N,) int32, and
    ``top_ids`` (N, 20) int32 and ``top`` (N, 20) float32 receive the ``num_top`` likeliest tokens, at most 20 and at
    most V, likeliest first; ties go to the lowest ids. All are NaN if the best logit is not finite.
    """
    (lines,) = num_top.shape
    check(logits, (lines, shape.stride), shape.dtype)
    check(num_lines, (1,), torch.int32)
    for tensor in (num_top, token_ids):
        check(tensor, (lines,), torch.int32)
    for name, (kind, *sizes) in WORKSPACE.items():
        check(room[name], (lines, shape.slices, *sizes), kind)
    check(chosen, (lines,), torch.float32)
    check(top_ids, (lines, MAX_TOP), torch.int32)
    check(top, (lines, MAX_TOP), torch.float32)
    partial = [room[name] for name in WORKSPACE]
    rank, gather = logprobs_variants(shape)
    rank.launch((lines, shape.slices), logits, num_lines, num_top, *partial)
    gather.launch((lines,), logits, num_lines, num_top, token_ids, *partial, chosen, top_ids, top)

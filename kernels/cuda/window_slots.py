"""The slots of a step's tokens in layers with windows, if these have pages of their own."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import check, num_warps
from penstock.kernels.cuda.core.launch import KernelVariant
from penstock.kernels.cuda.step import BLOCK, MIN_SEQUENCES, StepTensors

NUMBERS = ("num_sequences", "num_tokens", "num_rows", "stride")
"""The arguments of the kernel that are numbers."""


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=NUMBERS)
def _window_slots(
    rows,
    query_starts,
    positions,
    slots,
    tables,
    window_slots,
    num_sequences,
    num_tokens,
    num_rows,
    stride,
    NUM_GROUPS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    sequences = tl.arange(0, BLOCK_SEQUENCES)
    there = sequences < num_sequences
    ends = tl.load(query_starts + 1 + sequences, mask=there, other=0)
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = tokens < num_tokens
    # The index of a token's sequence is the number of sequences that end at or before the token.
    before = (ends[None, :] <= tokens[:, None]) & there[None, :]
    owner = tl.sum(before.to(tl.int32), axis=1)
    stored = inside & (owner < num_sequences)
    stored &= tl.load(slots + tokens, mask=inside, other=-1) >= 0
    row = tl.load(rows + owner, mask=stored, other=0)
    position = tl.load(positions + tokens, mask=inside, other=0)
    for group in tl.static_range(NUM_GROUPS):
        at = (group * num_rows + row).to(tl.int64) * MAX_PAGES + position // SLOTS
        page = tl.load(tables + at, mask=stored, other=0).to(tl.int64)
        slot = tl.where(stored, page * SLOTS + position % SLOTS, -1)
        tl.store(window_slots + group * stride + tokens, slot, mask=inside)


def window_slots_variant(num_sequences: int, num_groups: int, max_pages: int, slots: int) -> KernelVariant:
    """The variant of ``find_window_slots`` for the given numbers of sequences, groups, pages in a table, and slots in a
    page. Numbers of sequences share variants as those of ``prepare`` do."""
    return _variant(max(triton.next_power_of_2(num_sequences), MIN_SEQUENCES), num_groups, max_pages, slots)


@cache
def _variant(block_sequences: int, num_groups: int, max_pages: int, slots: int) -> KernelVariant:
    block_tokens = max(BLOCK // block_sequences, 1)
    return KernelVariant(
        _window_slots,
        {
            **dict.fromkeys(("rows", "query_starts", "positions"), torch.int32),
            "slots": torch.int64,
            "tables": torch.int32,
            "window_slots": torch.int64,
            **dict.fromkeys(NUMBERS, "i32"),
        },
        {
            "NUM_GROUPS": num_groups,
            "MAX_PAGES": max_pages,
            "SLOTS": slots,
            "BLOCK_SEQUENCES": block_sequences,
            "BLOCK_TOKENS": block_tokens,
        },
        num_warps=num_warps(block_sequences * block_tokens),
    )


def find_window_slots(step: StepTensors, tables: Tensor, slots: int, window_slots: Tensor) -> None:
    """Writes to ``window_slots`` (G, at least T) int64 where each group stores the step's tokens: page * S + slot, or
    -1 for a token that is not stored. ``prepare`` has filled in the step. ``tables`` (G, R, N) int32 are the groups'
    pages of each row, which have ``slots`` slots each."""
    (sequences,), (tokens,), (num_groups, num_rows, max_pages) = step.rows.shape, step.positions.shape, tables.shape
    check(step.rows, (sequences,), torch.int32)
    check(step.query_starts, (sequences + 1,), torch.int32)
    check(step.positions, (tokens,), torch.int32)
    check(step.slots, (tokens,), torch.int64)
    check(tables, (num_groups, num_rows, max_pages), torch.int32)
    check(window_slots, (num_groups, window_slots.shape[1]), torch.int64)
    assert tokens <= window_slots.shape[1]
    variant = window_slots_variant(sequences, num_groups, max_pages, slots)
    variant.launch(
        (triton.cdiv(tokens, variant.constants["BLOCK_TOKENS"]),),
        step.rows,
        step.query_starts,
        step.positions,
        step.slots,
        tables,
        window_slots,
        sequences,
        tokens,
        num_rows,
        window_slots.shape[1],
    )

"""The beginning and end of a step, computed on the device from the state of its rows, so the host need not know how
many tokens they have."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import check, num_warps
from penstock.kernels.cuda.core.launch import KernelVariant

MIN_SEQUENCES = 256
"""The minimum number of sequences of a variant, so that nearly all steps use the same one."""
BLOCK = 8192
"""Comparisons of tokens with sequences that a program does at once."""
COMMIT_BLOCK = 256
"""Sequences per program."""


@dataclass(frozen=True)
class DeviceRows:
    """The state of R rows, whose numbers stay the same from step to step."""

    tables: Tensor
    """(R, N) int32: pages in the order of positions; negative if nothing may be written there."""
    lengths: Tensor
    """(R,) int32: the number of tokens whose keys and values are in the pages."""
    next_tokens: Tensor
    """(R,) int32: the token after these, if it was sampled."""
    histories: Tensor
    """(R, L) int32: the token at every position that a step computed. Rejected drafts stay until other tokens are
    computed at their positions."""


@dataclass(frozen=True)
class StepTensors:
    """A step's B sequences and T tokens. Only the first ones are used; the others pad the buffers of a CUDA graph."""

    rows: Tensor
    """(B,) int32: the row numbers, without duplicates."""
    num_queries: Tensor
    """(B,) int32: the number of tokens in each sequence, which follow those of the previous sequence; 0 after the
    last."""
    given: Tensor
    """(T,) int32: tokens that the host knows; a negative entry stands for the row's next token."""
    token_ids: Tensor
    """(T,) int32; this and the following are written by ``prepare``."""
    positions: Tensor
    """(T,) int32."""
    slots: Tensor
    """(T,) int64: page * S + slot; -1 for a token that is not stored."""
    query_starts: Tensor
    """(B + 1,) int32: sequence b has tokens [query_starts[b], query_starts[b + 1])."""
    contexts: Tensor
    """(B,) int32: the number of tokens in KV after the step has written its own; 0 after the last sequence."""


@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])
def _prepare(
    rows,
    num_queries,
    given,
    tables,
    lengths,
    next_tokens,
    histories,
    token_ids,
    positions,
    slots,
    query_starts,
    contexts,
    num_sequences,
    num_tokens,
    MAX_PAGES: tl.constexpr,
    MAX_HISTORY: tl.constexpr,
    SLOTS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    sequences = tl.arange(0, BLOCK_SEQUENCES)
    there = sequences < num_sequences
    counts = tl.load(num_queries + sequences, mask=there, other=0)
    ends = tl.cumsum(counts, axis=0)
    if tl.program_id(0) == 0:
        tl.store(query_starts, 0)
        tl.store(query_starts + 1 + sequences, ends, mask=there)
        used = there & (counts > 0)
        row = tl.load(rows + sequences, mask=used, other=0)
        length = tl.load(lengths + row, mask=used, other=0)
        tl.store(contexts + sequences, tl.minimum(length + counts, MAX_PAGES * SLOTS), mask=there)

    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = tokens < num_tokens
    # The index of a token's sequence is the number of sequences that end at or before the token.
    before = (ends[None, :] <= tokens[:, None]) & there[None, :]
    owner = tl.sum(before.to(tl.int32), axis=1)
    start = tl.max(tl.where(before, ends[None, :], 0), axis=1)
    owned = inside & (owner < num_sequences)
    row = tl.load(rows + owner, mask=owned, other=0)
    position = tl.load(lengths + row, mask=owned, other=0) + tokens - start
    tabled = owned & (position < MAX_PAGES * SLOTS)
    past = row.to(tl.int64) * MAX_HISTORY + position
    noted = owned & (position < MAX_HISTORY)
    # Tokens and positions are clamped, so that none out of range becomes an address.
    position = tl.where(owned, tl.minimum(position, MAX_PAGES * SLOTS - 1), 0)
    known = tl.load(given + tokens, mask=owned, other=0)
    sampled = tl.load(next_tokens + row, mask=owned & (known < 0), other=0)
    token = tl.minimum(tl.maximum(tl.where(known < 0, sampled, known), 0), VOCAB - 1)
    page = tl.load(tables + row.to(tl.int64) * MAX_PAGES + position // SLOTS, mask=tabled, other=-1).to(tl.int64)
    slot = tl.where(page < 0, -1, page * SLOTS + position % SLOTS)
    tl.store(token_ids + tokens, token, mask=inside)
    tl.store(histories + past, token, mask=noted)
    tl.store(positions + tokens, position, mask=inside)
    tl.store(slots + tokens, slot, mask=inside)


@triton.jit(do_not_specialize=["num_sequences"])
def _commit(rows, num_kept, sampled, lengths, next_tokens, num_sequences, BLOCK: tl.constexpr):
    sequences = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = sequences < num_sequences
    kept = tl.load(num_kept + sequences, mask=there, other=0)
    moved = kept > 0
    row = tl.load(rows + sequences, mask=moved, other=0)
    length = tl.load(lengths + row, mask=moved, other=0)
    tl.store(lengths + row, length + kept, mask=moved)
    token = tl.load(sampled + sequences, mask=moved, other=-1)
    tl.store(next_tokens + row, token, mask=moved & (token >= 0))


def prepare_variant(num_sequences: int, max_pages: int, max_history: int, slots: int, vocab_size: int) -> KernelVariant:
    """The variant of ``prepare`` for the given numbers of sequences, pages in a table, tokens in a history, and slots
    in a page. All numbers of sequences up to ``MIN_SEQUENCES`` share a variant, and then all up to each further power
    of 2."""
    block_sequences = max(triton.next_power_of_2(num_sequences), MIN_SEQUENCES)
    return _prepare_variant(block_sequences, max_pages, max_history, slots, vocab_size)


@cache
def _prepare_variant(
    block_sequences: int, max_pages: int, max_history: int, slots: int, vocab_size: int
) -> KernelVariant:
    block_tokens = max(BLOCK // block_sequences, 1)
    names = ("rows", "num_queries", "given", "tables", "lengths", "next_tokens", "histories", "token_ids", "positions")
    return KernelVariant(
        _prepare,
        {
            **dict.fromkeys(names, torch.int32),
            "slots": torch.int64,
            "query_starts": torch.int32,
            "contexts": torch.int32,
            "num_sequences": "i32",
            "num_tokens": "i32",
        },
        {
            "MAX_PAGES": max_pages,
            "MAX_HISTORY": max_history,
            "SLOTS": slots,
            "VOCAB": vocab_size,
            "BLOCK_SEQUENCES": block_sequences,
            "BLOCK_TOKENS": block_tokens,
        },
        num_warps=num_warps(block_sequences * block_tokens),
    )


@cache
def commit_variant() -> KernelVariant:
    """The variant of ``commit``."""
    names = ("rows", "num_kept", "sampled", "lengths", "next_tokens")
    arguments: dict[str, torch.dtype | str] = {**dict.fromkeys(names, torch.int32), "num_sequences": "i32"}
    return KernelVariant(_commit, arguments, {"BLOCK": COMMIT_BLOCK}, num_warps=4)


def prepare(rows: DeviceRows, step: StepTensors, slots: int, vocab_size: int) -> None:
    """Fills in a step's tensors from its sequences, tokens and rows, for pages of ``slots`` slots, and records the
    tokens in the rows' histories.

    A sequence's tokens start at the row's length. Token ids outside the vocabulary are clamped, and so are positions
    and contexts beyond the capacity of a table. A token for which the row has no page is not stored.
    """
    (sequences,), (tokens,), (num_rows, max_pages) = step.rows.shape, step.given.shape, rows.tables.shape
    max_history = rows.histories.shape[1]
    for tensor in (step.num_queries, step.rows, step.contexts):
        check(tensor, (sequences,), torch.int32)
    for tensor in (step.given, step.token_ids, step.positions):
        check(tensor, (tokens,), torch.int32)
    check(step.slots, (tokens,), torch.int64)
    check(step.query_starts, (sequences + 1,), torch.int32)
    check(rows.tables, (num_rows, max_pages), torch.int32)
    check(rows.histories, (num_rows, max_history), torch.int32)
    for tensor in (rows.lengths, rows.next_tokens):
        check(tensor, (num_rows,), torch.int32)
    variant = prepare_variant(sequences, max_pages, max_history, slots, vocab_size)
    grid = (triton.cdiv(tokens, variant.constants["BLOCK_TOKENS"]),)
    variant.launch(grid, **vars(step), **vars(rows), num_sequences=sequences, num_tokens=tokens)


def commit(rows: DeviceRows, step: StepTensors, num_kept: Tensor, sampled: Tensor) -> None:
    """Advances each sequence's row: it keeps the first ``num_kept`` (B,) int32 of its tokens, and ``sampled`` (B,)
    int32, if not negative, becomes its next token. Nothing changes for a sequence that keeps none."""
    (sequences,) = step.rows.shape
    for tensor in (step.rows, num_kept, sampled):
        check(tensor, (sequences,), torch.int32)
    grid = (triton.cdiv(sequences, COMMIT_BLOCK),)
    commit_variant().launch(grid, step.rows, num_kept, sampled, rows.lengths, rows.next_tokens, sequences)

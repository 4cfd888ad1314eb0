"""Verifies drafts: decides how many of a step's tokens each row keeps. A draft is accepted if it equals the token that
was chosen at its position."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import check
from penstock.kernels.cuda.core.launch import KernelVariant
from penstock.kernels.cuda.sampling.tensors import COUNTS, NUM_INTEGERS, SamplerRows, SamplerShape

BLOCK = 32
"""Sampled positions of a sequence that are compared at once; a power of 2. Few sequences have more."""


@triton.jit(do_not_specialize=["num_sequences"])
def _accept(
    line_starts,
    rows,
    drafts,
    token_ids,
    integers,
    counts,
    num_kept,
    last,
    num_sequences,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    if sequence >= num_sequences:
        return
    start = tl.load(line_starts + sequence)
    end = tl.load(line_starts + sequence + 1)
    kept = 0
    if start < end:
        places = tl.arange(0, BLOCK)
        num_right = tl.full([], BLOCK, tl.int32)
        while num_right == BLOCK:
            lines = start + kept + places
            # No draft follows the last position.
            inside = lines < end - 1
            tokens = tl.load(token_ids + lines, mask=inside, other=-1)
            followed = inside & (tl.load(drafts + lines, mask=inside, other=-1) == tokens)
            num_right = tl.min(tl.where(followed, BLOCK, places), axis=0)
            kept += num_right
        kept += 1
        tl.store(last + sequence, tl.load(token_ids + start + kept - 1))
        row = tl.load(rows + start).to(tl.int64)
        counted = tl.load(integers + row * NUM_INTEGERS + COUNTS)
        if counted >= 0:
            # One after another, because a token may occur twice.
            line = start
            while line < start + kept:
                place = counts + counted * VOCAB + tl.load(token_ids + line)
                tl.store(place, tl.maximum(tl.load(place), 1) + 1)
                tl.debug_barrier()
                line += 1
    tl.store(num_kept + sequence, kept)


@cache
def accept_variant(shape: SamplerShape) -> KernelVariant:
    """The variant of ``accept``."""
    names = ("line_starts", "rows", "drafts", "token_ids")
    return KernelVariant(
        _accept,
        {
            **dict.fromkeys(names, torch.int32),
            "integers": torch.int64,
            **dict.fromkeys(("counts", "num_kept", "last"), torch.int32),
            "num_sequences": "i32",
        },
        {"VOCAB": shape.vocab_size, "BLOCK": BLOCK},
        num_warps=1,
    )


def accept(
    shape: SamplerShape,
    rows: SamplerRows,
    line_starts: Tensor,
    line_rows: Tensor,
    drafts: Tensor,
    token_ids: Tensor,
    num_kept: Tensor,
    last: Tensor,
) -> None:
    """Computes how many of its tokens each of B sequences keeps, and the last of them; all int32.

    A sequence b that samples has the sampled positions [line_starts[b], line_starts[b + 1]). For each of N positions,
    ``token_ids`` is the chosen token, and ``drafts`` the token that the sequence's next position assumes, if there is
    one. A sequence keeps the tokens up to the first that differs from its draft, or up to the last, and counts them for
    penalties. ``num_kept`` (B,) is 0 for a sequence without sampled positions; its ``last`` (B,) does not change.
    """
    (num_lines,), (num_sequences,) = token_ids.shape, num_kept.shape
    check(line_starts, (num_sequences + 1,), torch.int32)
    for tensor in (line_rows, drafts, token_ids):
        check(tensor, (num_lines,), torch.int32)
    for tensor in (num_kept, last):
        check(tensor, (num_sequences,), torch.int32)
    num_rows, num_integers = rows.integers.shape
    assert num_integers == NUM_INTEGERS.value
    check(rows.integers, (num_rows, num_integers), torch.int64)
    check(rows.counts, (len(rows.counts), shape.vocab_size), torch.int32)
    accept_variant(shape).launch(
        (num_sequences,),
        line_starts,
        line_rows,
        drafts,
        token_ids,
        rows.integers,
        rows.counts,
        num_kept,
        last,
        num_sequences,
    )

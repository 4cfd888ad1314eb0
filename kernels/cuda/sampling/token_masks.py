"""Masks of the tokens that are forbidden at a sampled position: stops that come too early, and tokens that would
complete a bad word. Also finds the lowest token that a mask allows."""

import triton
import triton.language as tl

from penstock.kernels.cuda.sampling.scores import line_of
from penstock.kernels.cuda.sampling.tensors import FIRST_STOP, FIRST_WORD, FREE_FROM, NUM_INTEGERS, WORDS_END

BLOCK_WORDS = tl.constexpr(256)
BLOCK_MASK = tl.constexpr(1024)


@triton.jit
def forbid(
    num_lines,
    rows,
    positions,
    integers,
    histories,
    word_starts,
    word_tokens,
    forbidden,
    num_forbidden,
    VOCAB: tl.constexpr,
    MAX_HISTORY: tl.constexpr,
):
    """Writes the mask of forbidden tokens, and their number."""
    line, row = line_of(num_lines, rows)
    if row < 0:
        return
    MASK_WORDS: tl.constexpr = (VOCAB + 31) // 32
    position = tl.load(positions + line)
    own = integers + row * NUM_INTEGERS
    early = position < tl.load(own + FREE_FROM)
    at = tl.where(early, tl.load(own + FIRST_STOP), tl.load(own + FIRST_WORD))
    end = tl.load(own + WORDS_END)
    mask = forbidden + line * MASK_WORDS
    if at < end:
        for first in range(0, MASK_WORDS, BLOCK_MASK):
            lanes = first + tl.arange(0, BLOCK_MASK)
            tl.store(mask + lanes, 0, mask=lanes < MASK_WORDS)
        tl.debug_barrier()
    count = 0
    while at < end:
        words = at + tl.arange(0, BLOCK_WORDS)
        there = words < end
        starts = tl.load(word_starts + words, mask=there, other=0)
        ends = tl.load(word_starts + words + 1, mask=there, other=0)
        longest = tl.max(ends - starts, axis=0)
        back = 1
        while back < longest:
            # The word's token at this distance before its last one, and the history's token at the same place.
            inside = there & (ends - starts > back)
            token = tl.load(word_tokens + ends - 1 - back, mask=inside, other=0)
            past = tl.load(histories + row * MAX_HISTORY + position - back, mask=position >= back, other=-1)
            there = there & ((ends - starts <= back) | (past == token))
            back += 1
        last = tl.load(word_tokens + ends - 1, mask=there, other=VOCAB)
        there = there & (last < VOCAB)
        tl.atomic_or(mask + last // 32, tl.full([BLOCK_WORDS], 1, tl.int32) << (last % 32), mask=there)
        count += tl.sum(there.to(tl.int32), axis=0)
        at += BLOCK_WORDS
    tl.store(num_forbidden + line, count)


@triton.jit
def lowest_of(mask, VOCAB: tl.constexpr):
    """The lowest token whose bit is set, or 0 if none is; int32."""
    MASK_WORDS: tl.constexpr = (VOCAB + 31) // 32
    first = tl.full([], MASK_WORDS, tl.int32)
    for begin in range(0, MASK_WORDS, BLOCK_MASK):
        places = begin + tl.arange(0, BLOCK_MASK)
        words = tl.load(mask + places, mask=places < MASK_WORDS, other=0)
        first = tl.minimum(first, tl.min(tl.where(words != 0, places, MASK_WORDS), axis=0))
    bits = tl.arange(0, 32)
    is_set = ((tl.load(mask + first, mask=first < MASK_WORDS, other=0) >> bits) & 1) != 0
    lowest = tl.min(tl.where(is_set, 32 * first + bits, VOCAB), axis=0)
    return tl.where(lowest < VOCAB, lowest, 0)

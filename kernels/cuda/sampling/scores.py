"""Scores and keys of tokens, computed from the logits of a sampled position and the best of them.

A token's score is (x - best) / temperature in float32, so the best score is 0. A key orders tokens by score and, among
equal scores, lowest id first. Keys are unique, so a single key defines what a filter keeps.
"""

import triton
import triton.language as tl

from penstock.kernels.cuda.sampling.tensors import NUM_NUMBERS, TEMPERATURE

ID_BITS = tl.constexpr(20)
"""The number of low bits of a key that hold the id."""
MAX_ID = tl.constexpr((1 << 20) - 1)
MAX_BITS = tl.constexpr(0x7FFFFFFF)
"""All bits of a float32 except the sign."""


@triton.jit
def line_of(num_lines, rows):
    """A program's sampled position and its row. The row is negative for one that only pads a graph's buffers."""
    line = tl.program_id(0).to(tl.int64)
    return line, tl.load(rows + line, mask=line < tl.load(num_lines), other=-1).to(tl.int64)


@triton.jit
def bits_of(mask, ids, inside):
    """Whether each id's bit of a mask is set."""
    words = tl.load(mask + ids // 32, mask=inside, other=0)
    return ((words >> (ids % 32)) & 1) != 0


@triton.jit
def best_of_line(best, best_ids, num_forbidden, line, SLICES: tl.constexpr):
    """The best logit, its token, and whether forbidden tokens are left out. They are not if no others are left."""
    parts = tl.arange(0, triton.next_power_of_2(SLICES))
    inside = parts < SLICES
    every = tl.load(best + (line * 2 + 1) * SLICES + parts, mask=inside, other=-float("inf"))
    allowed = tl.load(best + line * 2 * SLICES + parts, mask=inside, other=-float("inf"))
    forbids = (tl.load(num_forbidden + line) > 0) & (tl.max(allowed, axis=0) > -float("inf"))
    top, part = tl.max(
        tl.where(forbids, allowed, every), axis=0, return_indices=True, return_indices_tie_break_left=True
    )
    top_id = tl.load(best_ids + (line * 2 + tl.where(forbids, 0, 1)) * SLICES + part)
    return top, top_id, forbids


@triton.jit
def is_number(x):
    """Whether a value is neither NaN nor infinite."""
    return (x > -float("inf")) & (x < float("inf"))


@triton.jit
def load_scores(scores, forbidden, line, part, top, forbids, numbers, row, VOCAB: tl.constexpr, SLICE: tl.constexpr):
    """The ids of a slice and their scores: minus infinity for masked tokens and for ids past the vocabulary."""
    ids = part * SLICE + tl.arange(0, SLICE)
    inside = ids < VOCAB
    x = tl.load(scores + line * VOCAB + ids, mask=inside, other=-float("inf"))
    if forbids:
        x = tl.where(bits_of(forbidden + line * ((VOCAB + 31) // 32), ids, inside), -float("inf"), x)
    temperature = tl.load(numbers + row * NUM_NUMBERS + TEMPERATURE).to(tl.float32)
    return ids, tl.div_rn(x - top, temperature + tl.zeros_like(x))


@triton.jit
def key_of(score, ids):
    """The key of a token, int64, at least 1. Scores are not positive, so their bits without the sign fall as the scores
    rise."""
    rank = MAX_BITS - (score.to(tl.int32, bitcast=True) & MAX_BITS)
    return (rank.to(tl.int64) << ID_BITS) | (MAX_ID - ids)


@triton.jit
def score_of(key):
    """The score of a key."""
    bits = MAX_BITS - (key >> ID_BITS).to(tl.int32)
    return -(bits.to(tl.float32, bitcast=True))

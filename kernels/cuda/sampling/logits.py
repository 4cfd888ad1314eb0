"""Applies penalties, biases and masks to logits, and finds the best of each slice of the vocabulary."""

import triton
import triton.language as tl

from penstock.kernels.cuda.sampling.scores import bits_of, line_of
from penstock.kernels.cuda.sampling.tensors import (
    BIASES,
    COUNTS,
    FREQUENCY,
    NUM_INTEGERS,
    NUM_NUMBERS,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
)


@triton.jit
def _penalised(x, seen, own):
    """Applies the repetition penalty to tokens in prompt or output: x / p if x > 0, else x p. Then x - frequency *
    count - presence * (count > 0), counted over the output.

    Each operation is rounded separately, as in the reference. The compiler may fuse a product with a following
    addition, but not a fused multiply-add that adds 0.
    """
    repetition = tl.load(own + REPETITION).to(tl.float32) + tl.zeros_like(x)
    count = tl.maximum(seen - 1, 0)
    frequency = tl.load(own + FREQUENCY) + tl.zeros_like(count).to(tl.float64)
    lowered = tl.fma(frequency, count.to(tl.float64), tl.zeros_like(frequency))
    lowered += tl.where(count > 0, tl.load(own + PRESENCE), 0.0)
    repeated = tl.where(x > 0, tl.div_rn(x, repetition), tl.fma(x, repetition, tl.zeros_like(x)))
    return tl.where(seen > 0, repeated - lowered.to(tl.float32), x)


@triton.jit
def process_logits(
    logits,
    num_lines,
    rows,
    positions,
    num_drafts,
    masks,
    mask_words,
    numbers,
    integers,
    histories,
    counts,
    biases,
    forbidden,
    num_forbidden,
    scores,
    best,
    best_ids,
    binned,
    num_listed,
    thresholds,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    MAX_HISTORY: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    BINS: tl.constexpr,
):
    """Finds the best token of a slice, with and without forbidden tokens, and stores the scores of positions whose
    token is drawn at random."""
    line, row = line_of(num_lines, rows)
    part = tl.program_id(1)
    if row < 0:
        return
    MASK_WORDS: tl.constexpr = (VOCAB + 31) // 32
    own = integers + row * NUM_INTEGERS
    ids = part * SLICE + tl.arange(0, SLICE)
    inside = ids < VOCAB
    x = tl.load(logits + line * STRIDE + ids, mask=inside, other=-float("inf")).to(tl.float32)

    counted = tl.load(own + COUNTS)
    if counted >= 0:
        seen = tl.load(counts + counted * VOCAB + ids, mask=inside, other=0)
        draft = tl.load(positions + line) - tl.load(num_drafts + line)
        while draft < tl.load(positions + line):
            token = tl.load(histories + row * MAX_HISTORY + draft)
            seen = tl.where(ids == token, tl.maximum(seen, 1) + 1, seen)
            draft += 1
        x = _penalised(x, seen, numbers + row * NUM_NUMBERS)
    biased = tl.load(own + BIASES)
    if biased >= 0:
        x += tl.load(biases + biased * VOCAB + ids, mask=inside, other=0.0)
    masked = tl.load(masks + line).to(tl.int64)
    if masked >= 0:
        x = tl.where(bits_of(mask_words + masked * MASK_WORDS, ids, inside), x, -float("inf"))
    if tl.load(numbers + row * NUM_NUMBERS + TEMPERATURE) > 0.0:
        tl.store(scores + line * VOCAB + ids, x, mask=inside)

    # NaN counts as infinity: both are signs of a broken model.
    x = tl.where(x == x, x, float("inf"))
    top, at = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + (line * 2 + 1) * SLICES + part, top)
    tl.store(best_ids + (line * 2 + 1) * SLICES + part, part * SLICE + at)
    if tl.load(num_forbidden + line) > 0:
        x = tl.where(bits_of(forbidden + line * MASK_WORDS, ids, inside), -float("inf"), x)
        top, at = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + line * 2 * SLICES + part, top)
    tl.store(best_ids + line * 2 * SLICES + part, part * SLICE + at)
    if part == 0:
        tl.store(num_listed + line, 0)
        tl.store(thresholds + line, 0)
        tl.store(binned + line * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int64))

"""Draws the token of a sampled position: among the tokens that filters keep, the one with the largest sum of score and
keyed Gumbel noise. This is a draw from the softmax of the scores."""

import triton
import triton.language as tl

from penstock.kernels.cuda.sampling.noise import gumbel, noise_stream
from penstock.kernels.cuda.sampling.scores import best_of_line, is_number, key_of, line_of, load_scores
from penstock.kernels.cuda.sampling.tensors import LEAST_SCORE, NUM_INTEGERS, NUM_NUMBERS, SEED, TEMPERATURE
from penstock.kernels.cuda.sampling.token_masks import lowest_of


@triton.jit
def draw(
    num_lines,
    rows,
    positions,
    numbers,
    integers,
    scores,
    forbidden,
    num_forbidden,
    best,
    best_ids,
    thresholds,
    drawn,
    drawn_ids,
    VOCAB: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Finds the best sum in each slice."""
    line, row = line_of(num_lines, rows)
    part = tl.program_id(1)
    if row < 0:
        return
    if tl.load(numbers + row * NUM_NUMBERS + TEMPERATURE) <= 0.0:
        return
    top, _top_id, forbids = best_of_line(best, best_ids, num_forbidden, line, SLICES)
    if is_number(top):
        ids, score = load_scores(scores, forbidden, line, part, top, forbids, numbers, row, VOCAB, SLICE)
        least = tl.load(numbers + row * NUM_NUMBERS + LEAST_SCORE).to(tl.float32)
        kept = (key_of(score, ids) >= tl.load(thresholds + line)) & (score >= least) & (score > -float("inf"))
        tl.store(drawn + line * SLICES + part, tl.full([], -float("inf"), tl.float64))
        # Filters leave most slices empty, and noise costs more than everything else.
        if tl.sum(kept.to(tl.int32), axis=0) > 0:
            stream = noise_stream(tl.load(integers + row * NUM_INTEGERS + SEED), tl.load(positions + line))
            sums = tl.where(kept, score.to(tl.float64) + gumbel(stream, ids), -float("inf"))
            largest, at = tl.max(sums, axis=0, return_indices=True, return_indices_tie_break_left=True)
            tl.store(drawn + line * SLICES + part, largest)
            tl.store(drawn_ids + line * SLICES + part, part * SLICE + at)


@triton.jit
def choose(
    num_lines,
    rows,
    masks,
    mask_words,
    numbers,
    num_forbidden,
    best,
    best_ids,
    drawn,
    drawn_ids,
    token_ids,
    VOCAB: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Finds the best of all slices."""
    line, row = line_of(num_lines, rows)
    if row < 0:
        return
    top, token, _forbids = best_of_line(best, best_ids, num_forbidden, line, SLICES)
    if is_number(top):
        if tl.load(numbers + row * NUM_NUMBERS + TEMPERATURE) > 0.0:
            parts = tl.arange(0, triton.next_power_of_2(SLICES))
            sums = tl.load(drawn + line * SLICES + parts, mask=parts < SLICES, other=-float("inf"))
            _sum, part = tl.max(sums, axis=0, return_indices=True, return_indices_tie_break_left=True)
            token = tl.load(drawn_ids + line * SLICES + part)
    else:
        token = tl.zeros([], tl.int32)
        masked = tl.load(masks + line).to(tl.int64)
        if masked >= 0:
            token = lowest_of(mask_words + masked * ((VOCAB + 31) // 32), VOCAB)
    tl.store(token_ids + line, token)

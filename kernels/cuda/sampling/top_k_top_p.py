"""Finds the thresholds of top-k and top-p without sorting: a histogram over scores gives the bin of the threshold, and
a bisection over the keys of that bin's tokens gives the last token kept.

Numbers are added as integers, so sums are exact and independent of the order in which programs add. A filter has a
weight for each token and a target: it keeps the fewest tokens, largest keys first, whose weights reach the target. For
top-k all weights are 1 and the target is k. For top-p the weight is the token's share, e^(score - ln sum e^score).
"""

import triton
import triton.language as tl

from penstock.kernels.cuda.sampling.scores import best_of_line, is_number, key_of, line_of, load_scores, score_of
from penstock.kernels.cuda.sampling.tensors import NUM_INTEGERS, NUM_NUMBERS, TEMPERATURE, TOP_K, TOP_P

NATS = tl.constexpr(26.0)
"""The range of the histogram below the best score. The noise of two tokens differs by less, so an entry further below
cannot win, whether kept or not."""
MASS_ONE = tl.constexpr(1 << 44)
"""e^0 in fixed point. The sum over a vocabulary of 2^18 stays below 2^63."""
SHARE_ONE = tl.constexpr(1 << 60)
"""The share of all tokens together, in fixed point."""


@triton.jit
def filters_of(numbers, integers, row, VOCAB: tl.constexpr):
    """Returns top_k, or 0 if it keeps all tokens; whether top_p filters; and its target share in fixed point. Greedy
    rows have no filters."""
    drawn = tl.load(numbers + row * NUM_NUMBERS + TEMPERATURE) > 0.0
    top_k = tl.load(integers + row * NUM_INTEGERS + TOP_K)
    top_k = tl.where(drawn & (top_k < VOCAB), top_k, 0)
    top_p = tl.load(numbers + row * NUM_NUMBERS + TOP_P)
    share = top_p.to(tl.float32).to(tl.float64) * tl.full([], SHARE_ONE, tl.float64)
    # The likeliest token is kept even if the target is 0.
    return top_k, drawn & (top_p != 1.0), tl.maximum(share.to(tl.int64), 1)


@triton.jit
def mass_of(score):
    """e^score in fixed point."""
    return (tl.exp(score.to(tl.float64)) * tl.full([], MASS_ONE, tl.float64)).to(tl.int64)


@triton.jit
def log_of_mass(mass):
    """ln of a sum of masses in float32, rounded like the scores that it is subtracted from."""
    return tl.log(mass.to(tl.float64) / tl.full([], MASS_ONE, tl.float64)).to(tl.float32)


@triton.jit
def share_of(score, log_total):
    """e^(score - log_total) in fixed point. The difference is computed in float32, as in the reference."""
    return (tl.exp((score - log_total).to(tl.float64)) * tl.full([], SHARE_ONE, tl.float64)).to(tl.int64)


@triton.jit
def log_total_of_line(masses, line, SLICES: tl.constexpr):
    """ln of the sum of e^score, from the slices' masses."""
    parts = tl.arange(0, triton.next_power_of_2(SLICES))
    return log_of_mass(tl.sum(tl.load(masses + line * SLICES + parts, mask=parts < SLICES, other=0), axis=0))


@triton.jit
def bin_of(score, BINS: tl.constexpr):
    """The bin of a score: 0 for the best, BINS for scores too far below it."""
    bins = (tl.minimum(-score, NATS) * (BINS / NATS)).to(tl.int32)
    return tl.where(score > -NATS, tl.minimum(bins, BINS - 1), BINS)


@triton.jit
def crossing_of(binned, line, wanted, BINS: tl.constexpr):
    """The bin in which the weights reach the target, or BINS if they do not; and the sum of the weights before it."""
    bins = tl.arange(0, BINS)
    weights = tl.load(binned + line * BINS + bins)
    crossing = tl.sum((tl.cumsum(weights, axis=0) < wanted).to(tl.int32), axis=0)
    return crossing, tl.sum(tl.where(bins < crossing, weights, 0), axis=0)


@triton.jit
def sum_top_p_mass(
    num_lines,
    rows,
    numbers,
    integers,
    scores,
    forbidden,
    num_forbidden,
    best,
    best_ids,
    masses,
    VOCAB: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Computes the mass of each slice. Only for top-p without top-k."""
    line, row = line_of(num_lines, rows)
    if row < 0:
        return
    top_k, takes_p, _share = filters_of(numbers, integers, row, VOCAB)
    if (top_k > 0) | (takes_p == 0):
        return
    top, _top_id, forbids = best_of_line(best, best_ids, num_forbidden, line, SLICES)
    if is_number(top):
        _ids, score = load_scores(scores, forbidden, line, tl.program_id(1), top, forbids, numbers, row, VOCAB, SLICE)
        tl.store(masses + line * SLICES + tl.program_id(1), tl.sum(mass_of(score), axis=0))


@triton.jit
def build_histogram(
    num_lines,
    rows,
    numbers,
    integers,
    scores,
    forbidden,
    num_forbidden,
    best,
    best_ids,
    masses,
    binned,
    VOCAB: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    BINS: tl.constexpr,
):
    """Adds up the weight of each bin, for the first filter of a sampled position."""
    line, row = line_of(num_lines, rows)
    if row < 0:
        return
    top_k, takes_p, share = filters_of(numbers, integers, row, VOCAB)
    if (top_k == 0) & (takes_p == 0):
        return
    top, _top_id, forbids = best_of_line(best, best_ids, num_forbidden, line, SLICES)
    if is_number(top):
        _ids, score = load_scores(scores, forbidden, line, tl.program_id(1), top, forbids, numbers, row, VOCAB, SLICE)
        weights = tl.full([SLICE], 1, tl.int64)
        least = tl.zeros([], tl.int64)
        if top_k == 0:
            weights = share_of(score, log_total_of_line(masses, line, SLICES))
            # Tokens so unlikely that all of them together are half of the share that may be dropped.
            least = (SHARE_ONE - share) // (2 * VOCAB)
        bins = bin_of(score, BINS)
        tl.atomic_add(binned + line * BINS + bins, weights, mask=(bins < BINS) & (weights >= least), sem="relaxed")


@triton.jit
def list_candidates(
    num_lines,
    rows,
    numbers,
    integers,
    scores,
    forbidden,
    num_forbidden,
    best,
    best_ids,
    binned,
    listed,
    num_listed,
    VOCAB: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    BINS: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Lists the keys of the tokens in the bin where the first filter ends and, if top-p follows top-k, of those before
    it."""
    line, row = line_of(num_lines, rows)
    if row < 0:
        return
    top_k, takes_p, share = filters_of(numbers, integers, row, VOCAB)
    if (top_k == 0) & (takes_p == 0):
        return
    top, _top_id, forbids = best_of_line(best, best_ids, num_forbidden, line, SLICES)
    if is_number(top):
        crossing, _before = crossing_of(binned, line, tl.where(top_k > 0, top_k, share), BINS)
        ids, score = load_scores(scores, forbidden, line, tl.program_id(1), top, forbids, numbers, row, VOCAB, SLICE)
        bins = bin_of(score, BINS)
        taken = (bins < BINS) & ((bins == crossing) | ((top_k > 0) & takes_p & (bins < crossing)))
        places = tl.cumsum(taken.to(tl.int32), axis=0) - 1
        count = tl.sum(taken.to(tl.int32), axis=0)
        if count > 0:
            places += tl.atomic_add(num_listed + line, count, sem="relaxed")
            tl.store(listed + line * LISTED + places, key_of(score, ids), mask=taken & (places < LISTED))


@triton.jit
def _select(keys, weights, wanted):
    """The largest key such that the weights from it on reach the target; 0 if even all of them do not. Weights are not
    negative; keys of weight 0 are ignored."""
    low = tl.min(tl.where(weights > 0, keys, 1 << 62), axis=0)
    high = tl.max(keys, axis=0)
    if tl.sum(weights, axis=0) < wanted:
        low = tl.zeros_like(low)
        high = tl.zeros_like(high)
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = tl.sum(tl.where(keys >= middle, weights, 0), axis=0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _total(
    scores, forbidden, line, top, forbids, numbers, row, least, log_total, KIND: tl.constexpr, VOCAB: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    """The total weight of all tokens from a key on: their number, mass or share."""
    total = tl.zeros([], tl.int64)
    for part in range((VOCAB + SLICE - 1) // SLICE):
        ids, score = load_scores(scores, forbidden, line, part, top, forbids, numbers, row, VOCAB, SLICE)
        if KIND == "count":
            weights = (score > -float("inf")).to(tl.int64)
        elif KIND == "mass":
            weights = mass_of(score)
        else:
            weights = share_of(score, log_total)
        total += tl.sum(tl.where(key_of(score, ids) >= least, weights, 0), axis=0)
    return total


@triton.jit
def _select_in_line(
    scores, forbidden, line, top, forbids, numbers, row, least, log_total, wanted, KIND: tl.constexpr,
    VOCAB: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Like ``_select``, but over the keys of all tokens from ``least`` on. Returns ``least`` if they do not reach the
    target."""
    low = least
    high = tl.full([], 1 << 51, tl.int64)
    if _total(scores, forbidden, line, top, forbids, numbers, row, low, log_total, KIND, VOCAB, SLICE) < wanted:
        high = low
    while low < high:
        middle = low + (high - low + 1) // 2
        total = _total(scores, forbidden, line, top, forbids, numbers, row, middle, log_total, KIND, VOCAB, SLICE)
        low = tl.where(total >= wanted, middle, low)
        high = tl.where(total >= wanted, high, middle - 1)
    return low


@triton.jit
def _select_in_list(keys, top_k, takes_p, share, before, log_total):
    """The filters' threshold among the keys of a list, which is padded with 0."""
    threshold = tl.zeros([], tl.int64)
    if top_k > 0:
        threshold = _select(keys, (keys > 0).to(tl.int64), top_k - tl.where(takes_p, 0, before))
    if takes_p:
        kept = (keys > 0) & (keys >= threshold)
        score = tl.where(kept, score_of(keys), -float("inf"))
        if top_k > 0:
            log_total = log_of_mass(tl.sum(mass_of(score), axis=0))
        shares = share_of(score, log_total)
        threshold = tl.maximum(threshold, _select(keys, shares, share - tl.where(top_k > 0, 0, before)))
    return threshold


@triton.jit
def find_threshold(
    num_lines,
    rows,
    numbers,
    integers,
    scores,
    forbidden,
    num_forbidden,
    best,
    best_ids,
    masses,
    binned,
    listed,
    num_listed,
    thresholds,
    VOCAB: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    BINS: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Finds the smallest key that both filters keep. If the list has no room for all keys, the whole vocabulary is
    searched."""
    line, row = line_of(num_lines, rows)
    if row < 0:
        return
    top_k, takes_p, share = filters_of(numbers, integers, row, VOCAB)
    if (top_k == 0) & (takes_p == 0):
        return
    top, _top_id, forbids = best_of_line(best, best_ids, num_forbidden, line, SLICES)
    if is_number(top):
        log_total = tl.zeros([], tl.float32)
        if top_k == 0:
            log_total = log_total_of_line(masses, line, SLICES)
        threshold = tl.zeros([], tl.int64)
        count = tl.load(num_listed + line)
        if count <= LISTED:
            _crossing, before = crossing_of(binned, line, tl.where(top_k > 0, top_k, share), BINS)
            places = tl.arange(0, LISTED)
            keys = tl.load(listed + line * LISTED + places, mask=places < count, other=0)
            threshold = _select_in_list(keys, top_k, takes_p, share, before, log_total)
        else:
            if top_k > 0:
                threshold = _select_in_line(scores, forbidden, line, top, forbids, numbers, row, threshold, log_total,
                                            top_k, "count", VOCAB, SLICE)  # fmt: skip
                if takes_p:
                    log_total = log_of_mass(_total(scores, forbidden, line, top, forbids, numbers, row, threshold,
                                                   log_total, "mass", VOCAB, SLICE))  # fmt: skip
            if takes_p:
                threshold = _select_in_line(scores, forbidden, line, top, forbids, numbers, row, threshold, log_total,
                                            share, "share", VOCAB, SLICE)  # fmt: skip
        tl.store(thresholds + line, threshold)

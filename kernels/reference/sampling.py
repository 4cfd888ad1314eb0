"""Torch references of the sampling kernels: filters that do not sort the vocabulary, and noise that is a pure function
of its key.

Logits are (R, V) in fp32 or fp64, R being the number of rows and V the size of the vocabulary. Minus infinity marks
masked tokens.
"""

import math

import torch
from torch import Tensor

GOLDEN = -7046029254386353131
"""0x9E3779B97F4A7C15 as a signed integer: 2^64 over the golden ratio, the increment of SplitMix64."""
MIX_1 = -4658895280553007687
"""0xBF58476D1CE4E5B9."""
MIX_2 = -7723592293110705685
"""0x94D049BB133111EB."""

NOISE_RANGE = 26.0
"""In nats. The noise of two tokens differs by less than this: u lies in [1, 2^32] / (2^32 + 1), so the noise lies
between -3.10 and 22.19. An entry further below the best one cannot win."""

MAX_DRAWS = 1 << 19
"""Entries whose noise is in memory at a time."""

NUM_BINS = 4096
"""Bins of the histogram with which top-p finds its pivot."""


def mix64(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of 64 bits (Steele, Lea, Flood 2014). int64 in and out, arithmetic wraps."""
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """A logical right shift; torch has only the arithmetic one."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def keyed_uniform(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """u = (h + 1) / (2^32 + 1), h being the upper 32 bits of mix(mix(mix(seed) + position G) + (id + 1) G); fp64 in (0,
    1).

    This is SplitMix64's stream from a state that seed and position select, so it is the same on every device. The
    arguments are int64 and broadcast against each other.
    """
    return _uniform(_stream(seeds, positions), token_ids)


def keyed_gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """g = -ln(-ln(u)) with u from ``keyed_uniform``; fp64."""
    return _gumbel(_stream(seeds, positions), token_ids)


def _stream(seeds: Tensor, positions: Tensor) -> Tensor:
    """The state from which a row's noise is drawn at a position."""
    return mix64(mix64(seeds) + positions * GOLDEN)


def _uniform(streams: Tensor, token_ids: Tensor) -> Tensor:
    upper = _shift(mix64(streams + (token_ids + 1) * GOLDEN), 32)
    return upper.double().add_(1.0).div_(2.0**32 + 1.0)


def _gumbel(streams: Tensor, token_ids: Tensor) -> Tensor:
    return _uniform(streams, token_ids).log_().neg_().log_().neg_()


def keep_top_k(logits: Tensor, top_k: Tensor) -> None:
    """Masks, in place, all but the ``top_k`` largest entries of each row. Among equal entries the lowest ids are kept.

    ``top_k`` is (R,) int64, each at least 1.
    """
    width = min(int(top_k.max()), logits.shape[1])
    largest = torch.topk(logits, width, dim=1).values
    last = top_k.clamp(max=width).unsqueeze(1) - 1
    pivot = largest.gather(1, last)
    above = (largest > pivot).sum(1, keepdim=True)
    _keep_to_pivot(logits, pivot, last + 1 - above)


def keep_top_p(logits: Tensor, top_p: Tensor) -> None:
    """Masks, in place, all but the smallest set of the likeliest entries whose probability reaches ``top_p``.

    Among entries equal to the pivot the lowest ids are kept; the likeliest entry is always kept. ``top_p`` is (R,) in
    [0, 1]. A histogram over distances from the best entry finds the bin that holds the pivot; only that bin is sorted.
    """
    target = top_p.double().unsqueeze(1)
    log_total = torch.logsumexp(logits, 1, keepdim=True)
    # Distances grow as logits fall, even after rounding, so entries in an earlier bin are likelier.
    distance = logits.amax(1, keepdim=True) - logits
    # A NaN from a broken model must not become an invalid index.
    bins = (distance * (NUM_BINS / NOISE_RANGE)).nan_to_num_(0.0).clamp_(0, NUM_BINS - 1).long()
    mass = torch.zeros(logits.shape[0], NUM_BINS, dtype=torch.float64, device=logits.device)
    reached = mass.scatter_add_(1, bins, (logits - log_total).double().exp()).cumsum(1)
    crossing = (reached < target).sum(1, keepdim=True).clamp(max=NUM_BINS - 1)
    before = torch.where(crossing > 0, reached.gather(1, (crossing - 1).clamp(min=0)), 0.0)
    inside = bins == crossing
    count = inside.sum(1, keepdim=True)
    # If rounding keeps the total from reaching the target, the last bin may be empty; the pivot is then -inf.
    width = max(1, int(count.max()))
    ranked = torch.topk(logits.masked_fill(~inside, -math.inf), width, dim=1).values
    reached = before + (ranked - log_total).double().exp().cumsum(1)
    # Entry i is kept if the entries before it have not reached the target.
    last = torch.minimum((reached < target).sum(1, keepdim=True), count - 1).clamp(min=0)
    pivot = ranked.gather(1, last)
    _keep_to_pivot(logits, pivot, last + 1 - (ranked > pivot).sum(1, keepdim=True))


def keep_min_p(logits: Tensor, min_p: Tensor) -> None:
    """Masks, in place, entries less likely than ``min_p`` times the likeliest: x < max + ln(min_p). ``min_p`` is (R,)
    in [0, 1]."""
    floor = logits.amax(1, keepdim=True) + torch.log(min_p.to(logits.dtype)).unsqueeze(1)
    logits.masked_fill_(logits < floor, -math.inf)


def _keep_to_pivot(logits: Tensor, pivot: Tensor, num_equal: Tensor) -> None:
    """Masks the entries below the pivot, and those equal to it after the first ``num_equal`` ids. Both arguments are
    (R, 1)."""
    logits.masked_fill_(logits < pivot, -math.inf)
    equal = logits == pivot
    if bool((equal.sum(1, keepdim=True) > num_equal).any()):
        logits.masked_fill_(equal & (equal.cumsum(1) > num_equal), -math.inf)


def sample(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """argmax over ids of logit + keyed Gumbel noise, which draws from softmax(logits). Ties go to the lowest id.

    Noise is drawn only for entries that could win, and for a few rows at a time, which bounds its memory. ``seeds`` and
    ``positions`` are (R,) int64. Returns (R,) int64, with an arbitrary id for a row without a finite logit.
    """
    streams = _stream(seeds, positions)
    num_rows = max(1, MAX_DRAWS // logits.shape[1])
    parts = zip(torch.split(logits, num_rows), torch.split(streams, num_rows), strict=True)
    return torch.cat([_sample(part, stream) for part, stream in parts])


def _sample(logits: Tensor, streams: Tensor) -> Tensor:
    best = logits.amax(1, keepdim=True)
    rows, ids = torch.nonzero(logits >= best - NOISE_RANGE, as_tuple=True)
    scores = _gumbel(streams[rows], ids).add_(logits[rows, ids])
    num_rows, vocab_size = logits.shape
    top = torch.full((num_rows,), -math.inf, dtype=torch.float64, device=logits.device)
    top.scatter_reduce_(0, rows, scores, "amax")
    wins = scores == top[rows]
    chosen = torch.full((num_rows,), vocab_size - 1, dtype=torch.int64, device=logits.device)
    return chosen.scatter_reduce_(0, rows[wins], ids[wins], "amin")

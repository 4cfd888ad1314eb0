"""Filters against a plain sort, and the noise against the distributions that it must have."""

import math

import pytest
import torch

from penstock.kernels.reference import sampling as reference_sampling
from penstock.kernels.reference.sampling import (
    NOISE_RANGE,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keyed_gumbel,
    keyed_uniform,
    mix64,
    sample,
)

SIGNIFICANCE = 1e-3


def kept(logits):
    return [set(row.nonzero().flatten().tolist()) for row in logits > -math.inf]


def in_order(row):
    """Ids by falling logit, equal ones by rising id."""
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def naive_top_p(row, top_p):
    probabilities = row.double().softmax(0)
    total, ids = 0.0, set()
    for i in in_order(row.tolist()):
        ids.add(i)
        total += float(probabilities[i])
        if total >= top_p:
            break
    return ids


@pytest.fixture(params=["distinct", "ties", "flat", "masked"])
def logits(request):
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(6, 300, generator=generator) * 3
    if request.param == "ties":
        values = values.round()
    elif request.param == "flat":
        values = torch.zeros(6, 300)
    elif request.param == "masked":
        values[:, 40:] = -math.inf
    return values


def test_top_k_keeps_the_largest_and_of_equal_ones_the_lowest_ids(logits):
    top_k = torch.tensor([1, 2, 3, 17, 40, 299])
    expected = [set(in_order(row.tolist())[:k]) for row, k in zip(logits, top_k.tolist(), strict=True)]
    filtered = logits.clone()
    keep_top_k(filtered, top_k)
    finite = kept(logits)
    assert kept(filtered) == [ids & have for ids, have in zip(expected, finite, strict=True)]
    unmasked = filtered > -math.inf
    assert torch.equal(filtered[unmasked], logits[unmasked])


@pytest.mark.parametrize("num_bins", [1, 8, 4096])
def test_top_p_keeps_the_smallest_set_that_reaches_it(logits, num_bins, monkeypatch):
    monkeypatch.setattr(reference_sampling, "NUM_BINS", num_bins)
    # Sums in another order may differ where a sum is the target to the last bit, so no target is such a sum.
    top_p = torch.tensor([0.0, 0.1234, 0.5017, 0.9013, 0.9507, 0.9991])
    expected = [naive_top_p(row, p) for row, p in zip(logits, top_p.tolist(), strict=True)]
    keep_top_p(logits, top_p)
    assert kept(logits) == expected


def test_top_p_of_almost_all_keeps_almost_all():
    # Rounding may keep the sum of all from reaching such a target; how often depends on the row.
    logits = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    almost_one = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    for part in logits.split(1):
        before = part.clone()
        keep_top_p(part, almost_one.expand(1))
        lost = (part == -math.inf) & (before != -math.inf)
        assert before.softmax(-1)[lost].sum() < 1e-5


def test_a_draw_does_not_depend_on_how_many_rows_are_drawn_at_a_time(monkeypatch):
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(1))
    seeds, positions = torch.arange(9), torch.arange(9) * 7
    whole = reference_sampling.sample(logits, seeds, positions)
    monkeypatch.setattr(reference_sampling, "MAX_DRAWS", 100)
    assert torch.equal(reference_sampling.sample(logits, seeds, positions), whole)


def test_min_p_keeps_what_is_likely_enough(logits):
    min_p = torch.tensor([0.001, 0.01, 0.1, 0.5, 0.9, 1.0])
    probabilities = logits.double().softmax(-1)
    floor = probabilities.amax(1, keepdim=True) * min_p.double().unsqueeze(1)
    expected = [set(row.nonzero().flatten().tolist()) for row in probabilities >= floor * (1 - 1e-6)]
    keep_min_p(logits, min_p)
    assert kept(logits) == expected


def test_mix64_is_splitmix64():
    # The first outputs of SplitMix64 from the state 0 and 1234567, as published with the generator.
    golden = reference_sampling.GOLDEN
    zero = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    other = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for state, expected in ((0, zero), (1234567, other)):
        steps = torch.tensor([1, 2, 3]) * golden + state
        assert [value % (1 << 64) for value in mix64(steps).tolist()] == expected


def chi_square_p(counts, probabilities):
    """The chance of a deviation at least this large."""
    expected = probabilities * counts.sum()
    assert expected.min() >= 5
    statistic = ((counts - expected).square() / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def test_uniforms_are_uniform_along_each_key():
    n = 40_000
    numbers, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    for seeds, positions, ids in (
        (numbers, zero + 3, zero + 5),
        (zero + 3, numbers, zero + 5),
        (zero + 3, zero + 5, numbers),
        (-numbers, numbers, numbers),
    ):
        u = keyed_uniform(seeds, positions, ids)
        assert u.min() > 0
        assert u.max() < 1
        counts = torch.histc(u, bins=64, min=0, max=1).double()
        assert chi_square_p(counts, torch.full((64,), 1 / 64, dtype=torch.float64)) > SIGNIFICANCE
        # Neighbours do not know each other either.
        pairs = torch.histc((u[:-1] * 8).floor() * 8 + (u[1:] * 8).floor(), bins=64, min=0, max=64).double()
        assert chi_square_p(pairs, torch.full((64,), 1 / 64, dtype=torch.float64)) > SIGNIFICANCE


def test_noise_lies_within_the_range_that_filters_rely_on():
    low, high = torch.tensor([1.0, 2.0**32], dtype=torch.float64) / (2.0**32 + 1)
    spread = torch.log(-torch.log(low)) - torch.log(-torch.log(high))
    assert spread < NOISE_RANGE
    assert NOISE_RANGE - spread < 1
    assert torch.isfinite(keyed_gumbel(torch.arange(1000), torch.arange(1000), torch.arange(1000))).all()


@pytest.mark.parametrize("key", ["seeds", "positions"])
def test_figure_sampling_draws_from_softmax(key):
    """Chi-square of keyed Gumbel noise against softmax, over many seeds and over many positions of one seed."""
    n = 60_000
    logits = torch.tensor([2.0, 1.5, 0.0, -1.0, 0.3, -2.5, 1.0, -math.inf], dtype=torch.float64)
    numbers, fixed = torch.arange(n), torch.full((n,), 12345)
    seeds, positions = (numbers, fixed) if key == "seeds" else (fixed, numbers)
    drawn = sample(logits.expand(n, -1), seeds, positions)
    counts = torch.bincount(drawn, minlength=8).double()
    assert counts[7] == 0
    assert chi_square_p(counts[:7], logits[:7].softmax(0)) > SIGNIFICANCE


def test_the_chi_square_test_can_fail():
    counts = torch.tensor([5300.0, 4700.0], dtype=torch.float64)
    assert chi_square_p(counts, torch.tensor([0.5, 0.5], dtype=torch.float64)) < SIGNIFICANCE


def test_a_draw_depends_only_on_its_own_row():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(32, 500, generator=generator, dtype=torch.float64) * 4
    seeds, positions = torch.arange(32) * -(1 << 40), torch.arange(32)
    together = sample(logits, seeds, positions)
    alone = [int(sample(logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1])) for i in range(32)]
    assert together.tolist() == alone
    assert len(set(alone)) > 10


def test_skipping_hopeless_entries_changes_nothing():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(50, 400, generator=generator, dtype=torch.float64) * 20
    seeds, positions = torch.arange(50), torch.full((50,), 7)
    noise = keyed_gumbel(seeds.unsqueeze(1), positions.unsqueeze(1), torch.arange(400))
    assert torch.equal(sample(logits, seeds, positions), (logits + noise).argmax(1))


def test_a_row_of_nan_gives_some_id():
    logits = torch.full((2, 10), math.nan)
    logits[1] = 0.0
    chosen = sample(logits, torch.tensor([1, 1]), torch.tensor([0, 0]))
    assert 0 <= int(chosen[0]) < 10

"""Keyed noise: the reference's bits, and the distribution that it must have."""

import pytest
import torch
import triton
import triton.language as tl

from penstock.kernels.cuda.sampling.noise import gumbel, mix64, noise_stream
from penstock.kernels.reference.sampling import keyed_gumbel, mix64 as reference_mix64

SIGNIFICANCE = 1e-3
BLOCK = 4096


@triton.jit
def _mix(x, out, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(out + lanes, mix64(tl.load(x + lanes).to(tl.uint64)).to(tl.int64))


@triton.jit
def _noise(seeds, positions, ids, out, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stream = noise_stream(tl.load(seeds + lanes), tl.load(positions + lanes))
    tl.store(out + lanes, gumbel(stream, tl.load(ids + lanes)))


def noise(seeds, positions, ids):
    out = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    _noise[(len(seeds) // BLOCK,)](seeds, positions.int(), ids.int(), out, BLOCK=BLOCK)
    return out


def random_words(device):
    return torch.randint(-(1 << 63), (1 << 63) - 1, (BLOCK,), device=device)


def test_mix64_is_the_references_to_the_bit(device):
    x = random_words(device)
    x[:4] = torch.tensor([0, -1, 1 << 62, -(1 << 63)])
    out = torch.empty_like(x)
    _mix[(1,)](x, out, BLOCK=BLOCK)
    assert torch.equal(out, reference_mix64(x))


def test_noise_is_the_references(device):
    seeds = random_words(device)
    positions, ids = torch.randint(1 << 20, (2, BLOCK), device=device)
    torch.testing.assert_close(
        noise(seeds, positions, ids), keyed_gumbel(seeds, positions, ids), rtol=1e-14, atol=1e-14
    )


@pytest.mark.parametrize("key", ["seeds", "positions"])
def test_noise_draws_from_softmax(key, device):
    """Chi-square of the argmax of logits and noise against softmax."""
    n = 4 * BLOCK
    logits = torch.tensor([2.0, 1.5, 0.0, -1.0, 0.3, -2.5, 1.0], dtype=torch.float64, device=device)
    numbers, fixed = torch.arange(n, device=device), torch.full((n,), 12345, device=device)
    seeds, positions = (numbers, fixed) if key == "seeds" else (fixed, numbers)
    sums = [noise(seeds, positions, torch.full_like(numbers, i)) + x for i, x in enumerate(logits)]
    counts = torch.bincount(torch.stack(sums).argmax(0), minlength=len(logits)).double()
    expected = logits.softmax(0) * n
    statistic = ((counts - expected).square() / expected).sum()
    freedom = torch.tensor((len(logits) - 1) / 2, dtype=torch.float64, device=device)
    assert float(torch.special.gammaincc(freedom, statistic / 2)) > SIGNIFICANCE

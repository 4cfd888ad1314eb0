"""RMS norms against torch."""

import pytest
import torch
from torch.testing import assert_close

from penstock.kernels.cuda.norm import add_rms_norm, rms_norm
from penstock.kernels.reference import fused as reference_cuda, ops as reference

EPS = 1e-5
# Of an entry; in the interpreter, what is stored is not rounded but cut off.
ULP = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
PLACEMENTS = [(True, False), (True, True), (False, True)]
"""Whether there is a weight, and whether there is one for what is added."""


def check_norm(tokens, width, dtype, device):
    x = torch.randn(tokens, width, device=device).mul(3).to(dtype)
    weight = torch.randn(width, device=device)
    expected = reference.rms_norm(x, weight, EPS)
    y = torch.full_like(x, torch.nan)
    rms_norm(x, weight, EPS, y)
    assert_close(y, expected, rtol=ULP[dtype], atol=1e-6)


def check_added(tokens, width, dtype, device, has_weight, has_delta_weight):
    x = torch.randn(tokens, width, device=device).mul(3).to(dtype)
    delta = torch.randn(tokens, width, device=device).to(dtype)
    weight = torch.randn(width, device=device)
    delta_weight = torch.randn(width, device=device) if has_delta_weight else None
    y = torch.full_like(x, torch.nan) if has_weight else None
    expected = reference_cuda.add_rms_norm(x, delta, EPS, delta_weight)
    # What is added was rounded itself, where it was normed.
    slack = ULP[dtype] * 16 if has_delta_weight else 1e-6
    add_rms_norm(x, delta, EPS, weight=weight if has_weight else None, y=y, delta_weight=delta_weight)
    assert_close(x, expected, rtol=ULP[dtype], atol=slack)
    if has_weight:
        assert_close(y, reference.rms_norm(x, weight, EPS), rtol=ULP[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize("width", [1, 24, 576, 1024])
def test_norm(width, dtype, device):
    check_norm(3, width, dtype, device)


@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("width", [24, 576])
def test_norm_of_a_sum(width, placement, dtype, device):
    check_added(3, width, dtype, device, *placement)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize(("tokens", "width"), [(1, 4096), (256, 1152), (8192, 4096), (100, 8192)])
def test_norms_at_size(tokens, width, dtype, device):
    check_norm(tokens, width, dtype, device)
    for placement in PLACEMENTS:
        check_added(tokens, width, dtype, device, *placement)


def test_the_sum_is_exact_in_fp32(device):
    x, delta = torch.randn(2, 40, device=device), torch.randn(2, 40, device=device)
    expected = x + delta
    add_rms_norm(x, delta, EPS, weight=torch.ones(40, device=device), y=torch.empty_like(x))
    assert torch.equal(x, expected)


def test_columns_of_wider_rows_are_normed_in_place_and_the_others_kept(device):
    qkv = torch.randn(3, 128, device=device).bfloat16()
    weight = torch.randn(64, device=device)
    before = qkv.clone()
    part = qkv[:, 32:96]
    rms_norm(part, weight, EPS, part)
    assert_close(part, reference.rms_norm(before[:, 32:96], weight, EPS), rtol=ULP[torch.bfloat16], atol=0)
    assert torch.equal(qkv[:, :32], before[:, :32])
    assert torch.equal(qkv[:, 96:], before[:, 96:])


def test_the_normed_sum_may_take_the_place_of_what_was_added(device):
    x, delta = torch.randn(2, 40, device=device), torch.randn(2, 40, device=device)
    weight = torch.randn(40, device=device)
    expected = reference.rms_norm(x + delta, weight, EPS)
    add_rms_norm(x, delta, EPS, weight=weight, y=delta)
    assert_close(delta, expected, rtol=1e-6, atol=1e-6)


def test_a_token_is_normed_identically_alone_and_in_a_batch(device):
    x, weight = torch.randn(4, 96, device=device).bfloat16(), torch.randn(96, device=device)
    together = torch.empty_like(x)
    rms_norm(x, weight, EPS, together)
    for token in range(4):
        alone = torch.empty(1, 96, device=device, dtype=x.dtype)
        rms_norm(x[token : token + 1].clone(), weight, EPS, alone)
        assert torch.equal(alone[0], together[token])


def test_nothing_but_zeros_stays_so(device):
    x = torch.zeros(1, 17, device=device)
    rms_norm(x, torch.randn(17, device=device), EPS, x)
    assert (x == 0).all()


def test_what_does_not_fit_is_refused(device):
    x, weight = torch.zeros(2, 16, device=device), torch.zeros(16, device=device)
    with pytest.raises(AssertionError):
        rms_norm(x, weight[:8], EPS, x)
    with pytest.raises(AssertionError):
        rms_norm(x, weight.double(), EPS, x)
    with pytest.raises(AssertionError):
        add_rms_norm(x, x.bfloat16(), EPS, weight=weight, y=x)
    with pytest.raises(AssertionError):
        add_rms_norm(x, x.T.contiguous().T, EPS, weight=weight, y=x)
    with pytest.raises(AssertionError):
        add_rms_norm(x, x, EPS, weight=weight)

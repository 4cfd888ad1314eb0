"""What is made of the inputs of products, against torch."""

import pytest
import torch
from torch.testing import assert_close

from penstock.kernels.cuda.quantized.inputs import gather_inputs, narrow_inputs
from penstock.kernels.reference import fused as reference_cuda

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8 = torch.float8_e4m3fn


def check_narrow(x, dtype, group=0):
    expected, expected_scales = reference_cuda.narrow_inputs(x, dtype, group)
    out = torch.empty_like(x, dtype=dtype)
    scales = torch.full_like(expected_scales, torch.nan) if group else torch.full((len(x),), torch.nan, device=x.device)
    narrow_inputs(x, out, scales, group)
    scales = scales.view(expected_scales.shape)
    assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    have, want = out.float(), expected.float()
    if dtype == FP8 and x.device.type == "cpu":
        # The interpreter rounds to fp8 without the carry to the exponent.
        have = torch.where(expected.view(torch.uint8) & 7 == 0, want, have)
    # What a division makes of a tie may fall to either side.
    assert_close(have, want, rtol=2**-3 if dtype == FP8 else 0, atol=2**-9 if dtype == FP8 else 1)
    assert (have != want).float().mean() < 0.01
    assert have.abs().max() == (448 if dtype == FP8 else 127)


def check_gather(x):
    order = torch.randperm(x.shape[1], device=x.device)
    out = torch.empty_like(x)
    gather_inputs(x, order.int(), out)
    assert torch.equal(out, x[:, order])


@pytest.mark.parametrize("narrow", [torch.int8, FP8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_inputs(dtype, narrow, device):
    x = (torch.randn(5, 300, device=device) * torch.logspace(-3, 3, 5, device=device).unsqueeze(1)).to(dtype)
    x[2] = 0
    check_narrow(x, narrow)


@pytest.mark.parametrize("group", [32, 96, 128, 512])
def test_groups_of_columns_have_scales_of_their_own(group, device):
    x = torch.randn(5, 300, device=device) * torch.logspace(-1, 1, 300, device=device)
    x[2, 32:] = 0
    check_narrow(x, FP8, group)


def test_whole_numbers_are_the_nearest_and_ties_even(device):
    x = torch.tensor([[127.0, 0.5, 1.5, -0.5, -2.5, 2.4999, -126.51]], device=device)
    out, scales = torch.empty_like(x, dtype=torch.int8), torch.empty(1, device=device)
    narrow_inputs(x, out, scales)
    assert scales.item() == 1
    assert out.tolist() == [[127, 0, 2, 0, -2, 2, -127]]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_not_lost(bad, device):
    x = torch.randn(3, 40, device=device)
    x[1, 7] = bad
    scales = torch.empty(3, device=device)
    narrow_inputs(x, torch.empty_like(x, dtype=torch.int8), scales)
    assert scales.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [72, 2500])
def test_gather_inputs(columns, dtype, device):
    check_gather(torch.randn(3, columns, device=device).to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [4096, 14336, 28672])
def test_inputs_at_size(columns, dtype, device):
    x = torch.randn(1000, columns, device=device).to(dtype)
    for narrow in (torch.int8, FP8):
        check_narrow(x, narrow)
    check_narrow(x, FP8, 128)
    check_gather(x)

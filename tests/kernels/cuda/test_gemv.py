"""The product of one token against torch: in Triton's interpreter, or on a GPU where there is one."""

import pytest
import torch
from torch.testing import assert_close

from penstock.kernels.cuda.gemv import gemv, has_aligned_rows
from penstock.kernels.reference import ops as reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ROWS = [1, 6, 200]
"""Also fewer than a program's, and not a multiple of them."""


def tensors(rows, columns, dtype, device, is_biased):
    weight = (torch.randn(rows, columns, device=device) / columns**0.5).to(dtype)
    bias = torch.randn(rows, device=device).to(dtype) if is_biased else None
    return torch.randn(1, columns, device=device).to(dtype), weight, bias


@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("columns", [64, 1040, 4096])
@pytest.mark.parametrize("rows", ROWS)
def test_product(rows, columns, dtype, is_biased, device):
    x, weight, bias = tensors(rows, columns, dtype, device, is_biased)
    out = torch.full((1, rows), torch.nan, device=device, dtype=dtype)
    gemv(x, weight, out, bias)
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert_close(out.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("outputs", [3, 100])
def test_gate_and_up(outputs, activation, is_biased, device):
    x, weight, bias = tensors(2 * outputs, 80, torch.bfloat16, device, is_biased)
    out = torch.full((1, outputs), torch.nan, device=device, dtype=torch.bfloat16)
    gemv(x, weight, out, bias, activation)
    gate_up = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert_close(out.float(), reference.gated_activation(gate_up, activation), rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "columns"), [(6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (3072, 1024)]
)
def test_product_at_size(rows, columns, device):
    test_product(rows, columns, torch.bfloat16, False, device)
    outputs = rows // 2
    x, weight, _ = tensors(rows, columns, torch.bfloat16, device, is_biased=False)
    out = torch.full((1, outputs), torch.nan, device=device, dtype=torch.bfloat16)
    gemv(x, weight, out, activation="silu")
    expected = reference.gated_activation((x @ weight.T).float(), "silu")
    assert_close(out.float(), expected, rtol=3e-2, atol=3e-2)


def test_weights_that_kernels_cannot_read():
    weight = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert has_aligned_rows(weight)
    assert has_aligned_rows(weight[2:])
    assert not has_aligned_rows(weight[:, :40])
    assert not has_aligned_rows(torch.zeros(8, 20, dtype=torch.bfloat16))
    assert not has_aligned_rows(torch.zeros(100, dtype=torch.bfloat16)[1:65].view(2, 32))


def test_what_does_not_fit_is_refused(device):
    x, weight, bias = tensors(6, 64, torch.float32, device, is_biased=True)
    out = torch.empty(1, 6, device=device)
    for arguments in (
        (x.repeat(2, 1), weight, out),
        (x, weight, out[:, :4]),
        (x.double(), weight, out),
        (x, weight, out, bias[:4]),
    ):
        with pytest.raises(AssertionError):
            gemv(*arguments)

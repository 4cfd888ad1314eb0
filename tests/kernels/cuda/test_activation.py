"""Gated activations against torch."""

import pytest
import torch
from torch.testing import assert_close

from penstock.kernels.cuda.activation import gated_activation
from penstock.kernels.reference import ops as reference

# numpy's, in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

ACTIVATIONS = ["silu", "gelu", "gelu_tanh"]
ULP = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def random_gates(tokens, width, dtype, device):
    return torch.randn(tokens, 2 * width, device=device).mul(4).to(dtype)


def check_gated(tokens, width, activation, dtype, device):
    gate_up = random_gates(tokens, width, dtype, device)
    expected = reference.gated_activation(gate_up.double(), activation)
    out = torch.full((tokens, width), torch.nan, dtype=dtype, device=device)
    gated_activation(gate_up, activation, out)
    # 1 + erf cancels out far below zero.
    assert_close(out.double(), expected, rtol=ULP[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [16, 576, 2056])
def test_gated_activation(width, activation, dtype, device):
    check_gated(2, width, activation, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize("tokens", [1, 256, 4096])
def test_gates_at_size(tokens, dtype, device):
    for activation in ACTIVATIONS:
        check_gated(tokens, 14336, activation, dtype, device)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_far_from_zero(activation, device):
    gate = torch.tensor([[-3e38, -1e4, -90.0, 90.0, 1e4, 0.0, -0.0, 16.0]], device=device)
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    out = torch.empty_like(gate)
    gated_activation(gate_up, activation, out)
    assert_close(out, reference.gated_activation(gate_up, activation), rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_nan_gate_gives_nan_only_at_its_position(activation, device):
    gate_up = random_gates(1, 24, torch.float32, device)
    gate_up[0, 7] = torch.nan
    out = torch.empty(1, 24, device=device)
    gated_activation(gate_up, activation, out)
    assert out.isnan().nonzero().tolist() == [[0, 7]]


def test_what_does_not_fit_is_refused(device):
    gate_up, out = torch.zeros(2, 32, device=device), torch.zeros(2, 16, device=device)
    with pytest.raises(AssertionError):
        gated_activation(gate_up[:, :30], "silu", out)
    with pytest.raises(AssertionError):
        gated_activation(gate_up, "silu", out.bfloat16())
    with pytest.raises(AssertionError):
        gated_activation(gate_up[:1], "silu", out)

"""Products in fp8 of many tokens, by torch where it is faster. No GPU is here to say where, so the tests do."""

import math
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

if not find_spec("triton"):
    pytest.skip("needs Triton, which has wheels only for Linux", allow_module_level=True)

from penstock.kernels.cuda.quantized.scaled_mm import has_scaled_mm
from penstock.kernels.cuda.quantized.weights import Codes, WeightLayout
from penstock.models.backends.cuda.linear import CudaLinear, CudaLinears

pytestmark = pytest.mark.usefixtures("fp8_as_on_a_gpu")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
MAX_TOKENS = 300
LAYOUT = WeightLayout(Codes.FP8, 32, 128, narrows_inputs=True)


@pytest.fixture
def multiplied(monkeypatch) -> list[int]:
    """The numbers of tokens that torch multiplies."""
    counts, multiply = list[int](), functional.scaled_mm

    def scaled_mm(x, weight, x_scales, x_recipe, weight_scales, weight_recipe, *, output_dtype):
        assert x.dtype == weight.dtype == torch.float8_e4m3fn
        assert x_recipe == weight_recipe == functional.ScalingType.RowWise
        assert (x_scales.shape, weight_scales.shape) == ((len(x), 1), (1, weight.shape[1]))
        assert (x.stride(1), weight.stride(0)) == (1, 1)
        assert x_scales.dtype == weight_scales.dtype == torch.float32
        counts.append(len(x))
        return multiply(x, weight, x_scales, x_recipe, weight_scales, weight_recipe, output_dtype=output_dtype)

    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    return counts


def linear(
    rows: int = 32, columns: int = 128, *, deterministic: bool = False, is_biased: bool = False
) -> tuple[CudaLinears, CudaLinear]:
    no_checkpoint: Any = None
    linears = CudaLinears(no_checkpoint, "fp8", DEVICE, deterministic=deterministic)
    bias = torch.randn(rows, dtype=BF16, device=DEVICE) if is_biased else None
    made = linears.make((), lambda: torch.randn(rows, columns, dtype=BF16, device=DEVICE), bias, may_quantize=True)
    assert isinstance(made, CudaLinear)
    linears.take_room(BF16, MAX_TOKENS)
    return linears, made


def timed(*seconds: float):
    """A clock that tells these times one after another, and runs nothing."""
    left = list(seconds)
    return lambda run: left.pop(0)


@pytest.mark.parametrize(
    ("seconds", "max_tokens", "least"),
    [
        ((2.0, 1.0, 2.0, 1.0), 4096, 65),
        ((2.0, 1.0, 1.0, 1.0), 4096, 257),  # not with fewer
        ((1.0, 1.0), 4096, math.inf),
        ((2.0, 1.0), 200, 65),
        ((), 64, math.inf),
    ],
)
def test_torch_multiplies_from_where_it_is_faster(seconds, max_tokens, least):
    linears, made = linear()
    assert not linears.uses_scaled_mm(made.weight, 1 << 20)
    linears.measure(max_tokens, timed(*seconds))
    assert [linears.uses_scaled_mm(made.weight, tokens) for tokens in (64, 65, 256, 257)] == [
        tokens >= least for tokens in (64, 65, 256, 257)
    ]


@pytest.mark.parametrize("is_biased", [False, True])
def test_both_give_the_same(is_biased, multiplied):
    linears, made = linear(is_biased=is_biased)
    x = torch.randn(70, 128, dtype=BF16, device=DEVICE)
    by_kernels = made(x)
    linears.measure(MAX_TOKENS, timed(2.0, 1.0, 2.0, 1.0))
    assert_close(made(x), by_kernels, rtol=2**-7, atol=2**-5)
    assert_close(made(x[:64].clone()), by_kernels[:64], rtol=2**-7, atol=2**-5)
    assert multiplied == [70]


def test_bits_that_must_not_change_are_not_torchs(multiplied):
    linears, made = linear(deterministic=True)
    linears.measure(MAX_TOKENS, timed())
    made(torch.randn(70, 128, dtype=BF16, device=DEVICE))
    assert multiplied == []


@pytest.mark.parametrize(
    ("layout", "dtype", "can"),
    [
        (LAYOUT, BF16, True),
        (LAYOUT, torch.float16, False),
        (replace(LAYOUT, rows=24), BF16, False),
        (replace(LAYOUT, columns=120), BF16, False),  # is padded
        (replace(LAYOUT, group=128), BF16, False),
        (replace(LAYOUT, narrows_inputs=False), BF16, False),
        (replace(LAYOUT, codes=Codes.INT8), BF16, False),
    ],
)
def test_what_torch_can_multiply(layout, dtype, can):
    assert has_scaled_mm(layout, dtype) == can


@pytest.mark.gpu
def test_a_gpu_says_which_is_faster():
    linears, made = linear(4096, 4096)
    linears.measure(MAX_TOKENS)
    x = torch.randn(280, 4096, dtype=BF16, device=DEVICE)
    found = made(x)
    linears._min_scaled_tokens[made.weight.layout] = math.inf
    assert_close(found, made(x), rtol=2**-6, atol=1e-1)


def test_a_torch_that_cannot_multiply_here_is_left_out(monkeypatch, caplog):
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("rowwise scaling is not supported on this device")

    monkeypatch.setattr(functional, "scaled_mm", refuse)
    caplog.set_level("INFO")
    linears, made = linear()
    linears.measure(MAX_TOKENS, lambda run: float(run() is None))
    assert not linears.uses_scaled_mm(made.weight, MAX_TOKENS)
    assert "rowwise scaling is not supported" in caplog.text

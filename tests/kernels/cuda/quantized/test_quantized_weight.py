"""How quantised matrices are packed, and how float ones are quantised."""

import pytest
import torch

from penstock.kernels.cuda.quantized.quantize import quantize_fp8, quantize_int4, quantize_int8
from penstock.kernels.cuda.quantized.weights import Codes, QuantizedWeight, pack_bytes, pack_int4
from penstock.kernels.reference.fused import dequantize


def unpacked(weight: QuantizedWeight) -> torch.Tensor:
    """The codes, as the module says that they lie."""
    layout, codes = weight.layout, weight.codes
    if layout.codes is Codes.INT4:
        blocks = codes.view(layout.rows, layout.num_blocks, layout.block // 2)
        codes = torch.cat((blocks & 15, blocks >> 4), dim=2).view(layout.rows, -1)
    beyond = codes[:, layout.columns :]
    assert not beyond.float().any()
    return codes[:, : layout.columns]


def wide(weight: QuantizedWeight) -> torch.Tensor:
    zeros, scales = weight.zeros, weight.scales
    assert scales is not None
    return dequantize(unpacked(weight), scales, zeros, weight.layout.group, weight.order)


@pytest.mark.parametrize(
    ("group", "columns", "block"), [(0, 200, 128), (32, 96, 32), (64, 200, 64), (96, 200, 32), (384, 424, 128)]
)
def test_int4_codes_come_back(group, columns, block):
    groups = -(-columns // group) if group else 1
    codes = torch.randint(16, (24, columns), dtype=torch.uint8)
    scales, zeros = torch.rand(24, groups).half(), torch.randint(17, (24, groups)).float()
    order = torch.randperm(columns)
    weight = pack_int4(codes, scales, zeros, group=group, order=order)
    assert weight.layout.block == block
    assert weight.layout.num_groups == groups
    assert torch.equal(unpacked(weight), codes)
    assert weight.scales is not None
    assert torch.equal(weight.scales, scales.float())
    assert weight.zeros is not None
    assert torch.equal(weight.zeros, zeros.byte())
    assert weight.order is not None
    assert torch.equal(weight.order, order.int())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_bytes_come_back(dtype):
    codes = torch.randint(-128, 128, (24, 200)).to(dtype)
    weight = pack_bytes(codes, torch.rand(24, 1))
    assert weight.codes.shape == (24, 256)
    assert torch.equal(unpacked(weight).float(), codes.float())


@pytest.mark.parametrize("zero", [0.5, 128, -1])
def test_a_zero_point_that_kernels_cannot_take_away_is_refused(zero):
    with pytest.raises(AssertionError, match="zero points"):
        pack_int4(torch.zeros(8, 32, dtype=torch.uint8), torch.ones(8, 1), torch.full((8, 1), zero), group=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_byte_is_the_nearest_there_is(dtype):
    weight = (torch.randn(40, 200) * torch.logspace(-4, 4, 40).unsqueeze(1)).to(dtype)
    weight[7] = 0
    largest = weight.float().abs().amax(1, keepdim=True)
    made = quantize_int8(weight)
    assert ((wide(made) - weight.float()).abs() <= largest / 127 * 0.5001).all()
    assert unpacked(made).abs().amax(1).eq(127).sum() == 39
    made = quantize_fp8(weight)
    assert made.layout.narrows_inputs
    # Half of the last of three places, or of the least there is below 2**-6.
    assert ((wide(made) - weight.float()).abs() <= weight.float().abs() * 2**-4 + largest / 448 * 2**-10).all()


def test_int4_is_nearer_than_the_whole_range_of_a_group():
    weight = torch.randn(30, 328)
    weight[4, :128] = 0.0
    weight[5] = weight[5].abs() + 1  # zero stays in the range
    weight[:, 5] = 0.0
    made = wide(quantize_int4(weight))
    off = (made - weight).square()
    assert (made[:, 5] == 0).all()
    assert (made[4, :128] == 0).all()
    for begin in range(0, 328, 128):
        part = weight[:, begin : begin + 128]
        step = (part.amax(1).clamp(min=0) - part.amin(1).clamp(max=0)) / 15
        step = torch.where(step > 0, step, 1.0).unsqueeze(1)
        zero = (-part.amin(1, keepdim=True).clamp(max=0) / step).round()
        plain = (((part / step).round() + zero).clamp(0, 15) - zero) * step
        assert (off[:, begin : begin + 128].sum(1) <= (plain - part).square().sum(1) * 1.0001).all()
    assert off.sum() < 0.0095 * weight.square().sum()

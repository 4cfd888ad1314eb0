"""Products with weights that are quantised against torch, with weights multiplied out; and with those that are not."""

import pytest
import torch
from torch.testing import assert_close

from penstock.kernels.cuda.quantized.gemm import GemmWorkspace, gemm
from penstock.kernels.cuda.quantized.inputs import narrow_inputs
from penstock.kernels.cuda.quantized.weights import Codes, QuantizedWeight, keep_floats, pack_bytes, pack_int4
from penstock.kernels.reference.fused import dequantize

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
GROUPS = [0, 32, 64, 96, 128, 256]


def random_int4(rows, columns, group, device, *, ordered=False):
    """A packed weight and what it is, in float64."""
    groups = -(-columns // group) if group else 1
    codes = torch.randint(16, (rows, columns), dtype=torch.uint8, device=device)
    zeros = torch.randint(17, (rows, groups), device=device)
    scales = torch.rand(rows, groups, device=device) + 0.5
    order = torch.randperm(columns, device=device) if ordered else None
    weight = pack_int4(codes, scales, zeros, group=group, order=order)
    return weight, dequantize(codes, scales.double(), zeros, group, order)


def random_bytes(rows, columns, dtype, device, *, narrows_inputs=False, num_scales=None):
    """The same, of int8 or fp8."""
    codes = torch.randint(-128, 128, (rows, columns), device=device).to(dtype)
    scales = torch.rand(num_scales or rows, device=device) + 0.5
    weight = pack_bytes(codes, scales, narrows_inputs=narrows_inputs)
    return weight, dequantize(codes, scales.double().expand(rows).unsqueeze(1), None, 0, None)


def random_floats(rows, columns, dtype, device):
    """The same, of floats."""
    weight = torch.randn(rows, columns, device=device).to(dtype)
    return keep_floats(weight), weight.double()


def random_blocks(rows, columns, group, device):
    """Of fp8, with a scale of each row and group, as blocks of rows have them too."""
    groups = -(-columns // group)
    codes = torch.randint(-128, 128, (rows, columns), device=device).to(torch.float8_e4m3fn)
    scales = torch.rand(rows, groups, device=device) + 0.5
    weight = pack_bytes(codes, scales, group=group, narrows_inputs=True)
    return weight, dequantize(codes, scales.double(), None, group, None)


def of_form(form, rows, columns, device, dtype=torch.bfloat16):
    """A packed weight of that form, in groups of 128 where there are groups, and what it is; floats have ``dtype``."""
    if form == "floats":
        return random_floats(rows, columns, dtype, device)
    if form.startswith("int4"):
        return random_int4(rows, columns, 128, device, ordered=form.endswith("ordered"))
    if form == "fp8 blocks":
        return random_blocks(rows, columns, 128, device)
    codes = torch.float8_e4m3fn if form.startswith("fp8") else torch.int8
    return random_bytes(rows, columns, codes, device, narrows_inputs=form.endswith("inputs"))


def multiply(x: torch.Tensor, weight: QuantizedWeight, bias=None, *, deterministic=False) -> torch.Tensor:
    room = GemmWorkspace.allocate([weight.layout], x.dtype, len(x), x.device, deterministic=deterministic)
    out = torch.full((len(x), weight.layout.rows), torch.nan, dtype=x.dtype, device=x.device)
    gemm(x, weight, out, room, bias)
    return out


def check_product(x, weight, wide, *, deterministic=False):
    """Compares within what rounding the result, and sums in float32 of terms so large, can be off by. Tensor cores cut
    off what float32 has no place for, and sum fp8 with some 14 bits."""
    bias = torch.randn(len(wide), device=x.device)
    inputs = x.double()
    if weight.layout.narrows_inputs:
        layout, narrow = weight.layout, torch.empty_like(x, dtype=weight.layout.codes.value)
        scales = torch.empty((len(x), layout.num_groups) if layout.group else len(x), device=x.device)
        narrow_inputs(x, narrow, scales, layout.group)
        inputs = dequantize(narrow, scales.double().view(len(x), -1), None, layout.group, None)
    expected = inputs @ wide.T + bias.double()
    terms = (inputs.abs() @ wide.abs().T).max().item()
    out = multiply(x, weight, bias, deterministic=deterministic)
    slack = 2e-6
    if x.device.type == "cuda":
        slack = 2e-4 if weight.layout.narrows_inputs and weight.layout.codes is Codes.FP8 else 1e-5
    assert_close(out.double(), expected, rtol=TOLERANCE[x.dtype], atol=slack * terms)


def random_inputs(tokens, columns, dtype, device):
    return torch.randn(tokens, columns, device=device).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 3, 17, 65])
def test_int4(tokens, dtype, device):
    weight, wide = random_int4(40, 320, 64, device)
    check_product(random_inputs(tokens, 320, dtype, device), weight, wide)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("group", GROUPS)
def test_int4_groups_of_which_the_last_is_short(group, ordered, device):
    weight, wide = random_int4(70, 424, group, device, ordered=ordered)
    check_product(random_inputs(3, 424, torch.bfloat16, device), weight, wide)


@pytest.mark.parametrize("narrows_inputs", [False, True])
@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("tokens", [1, 3, 17, 65])
def test_bytes(tokens, codes, narrows_inputs, device):
    weight, wide = random_bytes(70, 136, codes, device, narrows_inputs=narrows_inputs)
    for dtype in TOLERANCE:
        check_product(random_inputs(tokens, 136, dtype, device), weight, wide)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 3, 65])
def test_floats(tokens, dtype, device):
    weight, wide = random_floats(70, 136, dtype, device)
    check_product(random_inputs(tokens, 136, dtype, device), weight, wide)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 17, 65])
def test_fp8_by_blocks(tokens, dtype, device):
    weight, wide = random_blocks(70, 264, 128, device)
    check_product(random_inputs(tokens, 264, dtype, device), weight, wide)


def test_one_scale_of_all_rows(device):
    weight, wide = random_bytes(24, 128, torch.float8_e4m3fn, device, num_scales=1)
    check_product(random_inputs(2, 128, torch.float32, device), weight, wide)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("form", ["int4 ordered", "int8", "int8 inputs", "fp8 blocks", "floats"])
def test_sums_that_have_parts(form, deterministic, device):
    columns = 1608  # three parts, which have different numbers of blocks
    weight, wide = of_form(form, 72, columns, device, torch.float16)
    for tokens in (2, 70):
        check_product(random_inputs(tokens, columns, torch.float16, device), weight, wide, deterministic=deterministic)


@pytest.mark.parametrize("form", ["int4", "int8", "int8 inputs", "fp8 inputs", "fp8 blocks", "floats"])
def test_results_do_not_depend_on_the_batch(form, device):
    columns = 1152
    weight, _ = of_form(form, 40, columns, device)
    x = random_inputs(65, columns, torch.bfloat16, device)
    every = multiply(x, weight, deterministic=True)
    for tokens in (slice(1), slice(5, 22), slice(33, 65)):
        alone = multiply(x[tokens].contiguous(), weight, deterministic=True)
        assert torch.equal(alone, every[tokens])


def test_more_tokens_than_there_is_room_for_parts(device, monkeypatch):
    monkeypatch.setattr("penstock.kernels.cuda.quantized.gemm.STEADY_PART_TOKENS", 16)
    weight, wide = random_bytes(8, 1024, torch.int8, device, narrows_inputs=True)
    check_product(random_inputs(35, 1024, torch.float32, device), weight, wide, deterministic=True)


def test_what_does_not_fit_is_refused(device):
    weight, _ = random_bytes(16, 1024, torch.int8, device)
    x, out = torch.zeros(2, 1024, device=device), torch.zeros(2, 16, device=device)
    room = GemmWorkspace.allocate([weight.layout], x.dtype, 1, x.device, deterministic=False)
    with pytest.raises(AssertionError):
        gemm(x, weight, out, room)
    room = GemmWorkspace.allocate([weight.layout], x.dtype, 2, x.device, deterministic=False)
    gemm(x, weight, out, room)
    with pytest.raises(AssertionError):
        gemm(x[:, :512].contiguous(), weight, out, room)
    with pytest.raises(AssertionError):
        gemm(x, weight, out.half(), room)
    with pytest.raises(AssertionError):
        gemm(x, weight, out, room, torch.zeros(16, dtype=torch.bfloat16, device=device))


SIZES = [(6144, 4096), (28672, 4096), (4096, 14336), (1024, 3072)]
FORMS = ["int4", "int4 ordered", "int8", "int8 inputs", "fp8", "fp8 inputs", "fp8 blocks", "floats"]


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_at_size(rows, columns, form, device):
    for dtype in (torch.bfloat16, torch.float16):
        weight, wide = of_form(form, rows, columns, device, dtype)
        for tokens in (1, 16, 17, 64, 200, 1000):
            check_product(random_inputs(tokens, columns, dtype, device), weight, wide)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_results_do_not_depend_on_the_batch_at_size(rows, columns, form, device):
    weight, _ = of_form(form, rows, columns, device)
    x = random_inputs(1000, columns, torch.bfloat16, device)
    every = multiply(x, weight, deterministic=True)
    for tokens in (slice(1), slice(7, 24), slice(100, 165), slice(300, 900)):
        assert torch.equal(multiply(x[tokens].contiguous(), weight, deterministic=True), every[tokens])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_a_graph_captures_it(tokens, form, device):
    weight, _ = of_form(form, 1024, 4096, device)
    x = random_inputs(tokens, 4096, torch.bfloat16, device)
    room = GemmWorkspace.allocate([weight.layout], x.dtype, tokens, device, deterministic=False)
    out = torch.empty(tokens, 1024, dtype=x.dtype, device=device)
    gemm(x, weight, out, room)  # compiles
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(x, weight, out, room)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)

"""Products of one token and of a few against torch: in Triton's interpreter, or on a GPU where there is one."""

import pytest
import torch
from torch.testing import assert_close

from penstock.kernels.cuda.gemv import gemv, has_aligned_rows
from penstock.kernels.cuda.skinny_gemm import SkinnyWorkspace, skinny_gemm, skinny_tiles
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


def few_tokens(tokens, rows, columns, dtype, device, is_biased):
    _, weight, bias = tensors(rows, columns, dtype, device, is_biased)
    x = torch.randn(tokens, columns, device=device).to(dtype)
    room = SkinnyWorkspace.allocate([(rows, columns)], device)
    room.partials.fill_(torch.nan)
    return x, weight, bias, room


def product(x, weight, bias):
    return torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())


@pytest.mark.parametrize(
    ("dtype", "is_biased"),
    [
        (torch.float16, False),
        (torch.bfloat16, True),
        pytest.param(torch.float16, True, marks=pytest.mark.soak),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(2, 6, 64), (16, 64, 128), (17, 200, 1040), (33, 70, 4096), (64, 130, 1152), (5, 8448 * 2, 16)],
)
def test_product_of_few_tokens(tokens, rows, columns, dtype, is_biased, device):
    x, weight, bias, room = few_tokens(tokens, rows, columns, dtype, device, is_biased)
    out = torch.full((tokens, rows), torch.nan, device=device, dtype=dtype)
    for _ in range(2):  # the second time with what the first one left in the workspace
        skinny_gemm(x, weight, out, room, bias)
        assert_close(out.float(), product(x, weight, bias), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not room.counters.any()


@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("tokens", "outputs", "columns"), [(2, 3, 1040), (20, 100, 80)])
def test_gate_and_up_of_few_tokens(tokens, outputs, columns, activation, is_biased, device):
    x, weight, bias, room = few_tokens(tokens, 2 * outputs, columns, torch.bfloat16, device, is_biased)
    out = torch.full((tokens, outputs), torch.nan, device=device, dtype=torch.bfloat16)
    skinny_gemm(x, weight, out, room, bias, activation)
    expected = reference.gated_activation(product(x, weight, bias), activation)
    assert_close(out.float(), expected, rtol=1.6e-2, atol=1.6e-2)


def test_parts_of_the_columns_are_shared_where_rows_are_few():
    assert [skinny_tiles(4096, 14336, tokens).parts for tokens in (16, 17, 64)] == [4, 2, 2]
    assert skinny_tiles(1024, 3072, 8).parts == 6
    assert skinny_tiles(6144, 4096, 8).parts == 1
    assert skinny_tiles(64, 512, 8).parts == 1
    assert skinny_tiles(28672, 4096, 8).parts == 1


@pytest.mark.parametrize("tokens", [2, 30, 64])
def test_a_token_has_the_same_bits_whatever_is_beside_it(tokens, device):
    """Within a bucket of tokens, the order of the sums is the same."""
    x, weight, _, room = few_tokens(tokens, 128, 2048, torch.bfloat16, device, is_biased=False)
    outs = [torch.empty(tokens, 128, device=device, dtype=torch.bfloat16) for _ in range(2)]
    skinny_gemm(x, weight, outs[0], room)
    x[1:] = torch.randn_like(x[1:])
    skinny_gemm(x, weight, outs[1], room)
    assert torch.equal(outs[0][0], outs[1][0])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(
    ("rows", "columns"), [(6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (3072, 1024), (4096, 2880)]
)
def test_few_tokens_at_size(tokens, rows, columns, device):
    test_product_of_few_tokens(tokens, rows, columns, torch.bfloat16, False, device)
    test_gate_and_up_of_few_tokens(tokens, rows // 2, columns, "silu", False, device)


def test_few_tokens_that_do_not_fit_are_refused(device):
    x, weight, bias, room = few_tokens(2, 6, 64, torch.bfloat16, device, is_biased=True)
    out = torch.empty(2, 6, device=device, dtype=torch.bfloat16)
    for arguments in (
        (x.repeat(40, 1), weight, out.repeat(40, 1), room),
        (x, weight, out[:, :4], room),
        (x.float(), weight, out, room),
        (x, weight, out, room, bias[:4]),
        (x.float(), weight.float(), out.float(), room),
    ):
        with pytest.raises(AssertionError):
            skinny_gemm(*arguments)

"""The norm of heads, rotation and the write of keys and values, against torch."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch.testing import assert_close

from penstock.kernels.cuda.core.common import narrowed
from penstock.kernels.cuda.rope_kv import rope_kv
from penstock.kernels.reference import fused as reference_cuda

FP8 = torch.float8_e4m3fn
EPS = 1e-6
POSITIONS = 50


@dataclass(frozen=True)
class Case:
    """Shapes of a call, and what it has."""

    tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    normed: bool = False
    value_eps: float | None = None
    values_are_keys: bool = False
    num_pages: int = 4
    page_slots: int = 16


class Inputs:
    """Random arguments; every third token is stored nowhere."""

    def __init__(self, case, device):
        heads = case.num_heads + (1 if case.values_are_keys else 2) * case.num_kv_heads
        self.values = {"value_eps": case.value_eps, "values_are_keys": case.values_are_keys}
        self.qkv = torch.randn(case.tokens, heads * case.head_dim, device=device).to(case.dtype)
        angles = torch.randn(POSITIONS, case.rotary_dim // 2, device=device) * 100
        self.cosines, self.sines = angles.cos(), angles.sin()
        self.positions = torch.randint(POSITIONS, (case.tokens,), device=device, dtype=torch.int32)
        self.slots = torch.randperm(case.num_pages * case.page_slots, device=device)[: case.tokens]
        self.slots[2::3] = -1
        shape = (case.num_pages, 2, case.num_kv_heads, case.page_slots, case.head_dim)
        self.pages = torch.randn(shape, device=device).to(case.kv_dtype)
        weights = torch.randn(2, case.head_dim, device=device)
        self.norm = (weights[0].clone(), weights[1].clone(), EPS) if case.normed else None
        # Small enough for some values to be too large.
        scales = torch.rand(2, case.num_kv_heads, device=device) / 100 + 1e-3
        self.scales = (scales[0].clone(), scales[1].clone()) if case.kv_dtype == FP8 else None
        self.query = torch.full((case.tokens, case.num_heads, case.head_dim), torch.nan, device=device).to(case.dtype)

    def run(self):
        rope_kv(
            self.qkv, self.cosines, self.sines, self.positions, self.slots, self.query, self.pages,
            norm=self.norm, scales=self.scales, **self.values,
        )  # fmt: skip

    def expect(self):
        """Queries and pages, and whether an element of the pages is written."""
        pages = self.pages.clone()
        query = reference_cuda.rope_kv(
            self.qkv, self.cosines, self.sines, self.positions, self.slots, pages, self.norm, self.scales, **self.values
        )
        num_pages, _, _, page_slots, _ = pages.shape
        written = torch.zeros(num_pages * page_slots, dtype=torch.bool, device=pages.device)
        written[self.slots[self.slots >= 0]] = True
        return query, pages, written.view(num_pages, 1, 1, page_slots, 1).expand(pages.shape)


def check(case, device):
    # Of the largest entries: a head's elements are rounded before they are turned; and in the interpreter not rounded
    # but cut off.
    slack = {torch.float32: 1e-6, torch.bfloat16: 2**-5, torch.float16: 2**-8}[case.dtype]
    inputs = Inputs(case, device)
    before = inputs.pages.clone()
    query, pages, written = inputs.expect()
    inputs.run()
    assert_close(inputs.query, query, rtol=slack, atol=2 * slack)
    have, want = inputs.pages.float(), pages.float()
    if case.kv_dtype == FP8:
        # Where keys were rounded before, the scales make much of what cancels out.
        if device.type == "cpu":
            # The interpreter rounds to fp8 without the carry to the exponent.
            have = torch.where(pages.view(torch.uint8) & 7 == 0, want, have)
        assert_close(have, want, rtol=2**-3, atol=2**-8 if case.dtype == torch.float32 else 16)
        assert (want.abs() == 448).any()
    else:
        assert_close(have, want, rtol=slack, atol=2 * slack)
    assert torch.equal(have[~written], before.float()[~written])
    assert not torch.equal(have[written], before.float()[written])


SMALL = Case(tokens=4, num_heads=6, num_kv_heads=2, head_dim=32, rotary_dim=32)
CASES = {
    "plain": SMALL,
    "normed": replace(SMALL, normed=True),
    "a part of a head": replace(SMALL, rotary_dim=12),
    "a part of a head, normed": replace(SMALL, rotary_dim=24, normed=True),
    "no power of 2": replace(SMALL, head_dim=80, rotary_dim=80, normed=True),
    "a part of no power of 2": replace(SMALL, head_dim=96, rotary_dim=40, normed=True),
    "one key head": replace(SMALL, num_heads=4, num_kv_heads=1, head_dim=256, rotary_dim=256, normed=True),
    "as many key heads": replace(SMALL, num_heads=10, num_kv_heads=10, head_dim=128, rotary_dim=128),
    "more heads than a program's": replace(SMALL, num_heads=40, num_kv_heads=20, head_dim=64, rotary_dim=64),
    "normed values": replace(SMALL, normed=True, value_eps=EPS),
    "values that are keys": replace(
        SMALL, head_dim=40, rotary_dim=40, normed=True, value_eps=EPS, values_are_keys=True
    ),
    "large heads": replace(SMALL, head_dim=512, rotary_dim=512, normed=True, value_eps=EPS),
    "bf16": replace(SMALL, dtype=torch.bfloat16, kv_dtype=torch.bfloat16),
    "bf16, normed": replace(SMALL, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, normed=True, rotary_dim=24),
    "fp16": replace(SMALL, dtype=torch.float16, kv_dtype=torch.float16, normed=True),
    "fp8": replace(SMALL, tokens=7, kv_dtype=FP8),
    "fp8, a part of a head, normed": replace(SMALL, tokens=7, kv_dtype=FP8, rotary_dim=24, normed=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rope_kv(case, device):
    check(case, device)


@triton.jit
def narrow_kernel(x, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, narrowed(tl.load(x + at), 2.0, out))


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_nan_stays_nan_in_fp8(dtype, device):
    """It would look like an ordinary number, and a broken model like a whole one."""
    x = torch.tensor([torch.nan, 1.0, 1e9, -torch.inf], device=device)
    out = torch.zeros(4, device=device).to(dtype)
    narrow_kernel[(1,)](x, out, 4)
    assert out[0].float().isnan()
    assert out[1:].float().tolist() == [0.5, 448.0, -448.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_queries(dtype, device):
    """Of a layer that takes keys and values from another one."""
    inputs: Any = Inputs(replace(SMALL, num_kv_heads=0, dtype=dtype, kv_dtype=dtype, normed=True), device)
    inputs.pages = None
    expected = reference_cuda.rope_kv(
        inputs.qkv, inputs.cosines, inputs.sines, inputs.positions, inputs.slots, None, inputs.norm, None
    )
    inputs.run()
    slack = 1e-6 if dtype == torch.float32 else 2**-5
    assert_close(inputs.query, expected, rtol=slack, atol=2 * slack)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 256, 4096])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "normed"), [(16, 8, True), (32, 8, False), (64, 8, False)])
def test_rope_kv_at_size(num_heads, num_kv_heads, normed, kv_dtype, tokens, device):
    size = Case(tokens, num_heads, num_kv_heads, 128, 128, torch.bfloat16, kv_dtype, normed, num_pages=400)
    check(size, device)


def test_a_token_gets_the_same_result_alone_and_in_a_batch(device):
    case = replace(SMALL, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, normed=True)
    together = Inputs(case, device)
    alone = Inputs(replace(case, tokens=1), device)
    for name in ("cosines", "sines", "pages", "norm"):
        setattr(alone, name, getattr(together, name))
    alone.pages = together.pages.clone()
    together.run()
    for name in ("qkv", "positions", "slots"):
        setattr(alone, name, getattr(together, name)[1:2].clone())
    alone.run()
    page, slot = divmod(int(alone.slots[0]), case.page_slots)
    assert torch.equal(alone.query[0], together.query[1])
    assert torch.equal(alone.pages[page, :, :, slot], together.pages[page, :, :, slot])


def test_what_does_not_fit_is_refused(device):
    def refused(**changed):
        inputs = Inputs(SMALL, device)
        for name, value in changed.items():
            setattr(inputs, name, value)
        with pytest.raises(AssertionError):
            inputs.run()

    inputs = Inputs(SMALL, device)
    refused(qkv=inputs.qkv[:, :-32].contiguous())
    refused(sines=inputs.sines[:, :-1].contiguous())
    refused(positions=inputs.positions.long())
    refused(slots=inputs.slots.int())
    refused(pages=inputs.pages.to(FP8))
    refused(scales=(torch.ones(2, device=device), torch.ones(2, device=device)))
    refused(norm=(torch.ones(16, device=device), torch.ones(32, device=device), EPS))

"""Products of few tokens by torch where it is faster. No GPU is here to say where, so the tests do."""

from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

if not find_spec("triton"):
    pytest.skip("needs Triton, which has wheels only for Linux", allow_module_level=True)

from penstock.models.architecture.spec_parts import Activation
from penstock.models.backends.cuda import linear as linear_module
from penstock.models.backends.cuda.linear import CudaLinears, SkinnyLinear
from penstock.models.backends.cuda.model import CudaModel
from penstock.models.backends.cuda.product_choice import SECONDS, ProductCandidates, ProductChoice, ProductForm
from penstock.models.backends.tensor_parallel import SingleRank
from penstock.models.backends.torch_common.weights import Mlp

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
BUCKETS = (1, 16, 32, 64)


def make_linears(*shapes: tuple[int, int], dtype: torch.dtype = BF16, deterministic: bool = False) -> tuple[Any, Any]:
    no_checkpoint: Any = None
    linears = CudaLinears(no_checkpoint, None, DEVICE, deterministic=deterministic)

    def weight(shape: tuple[int, int]) -> Callable[[], torch.Tensor]:
        return lambda: torch.randn(shape, device=DEVICE).to(dtype)

    made = [linears.make((), weight(shape), None, may_quantize=False) for shape in shapes]
    linears.take_room(dtype, 128)
    return linears, made


def timed(seconds_by_call: list[float]) -> Callable[[Callable[[], object]], float]:
    """A clock that tells these times one after another, and runs nothing."""
    return lambda run: seconds_by_call.pop(0)


def kernels_slower_for(*tokens: int) -> list[float]:
    """The times of the kernels and of torch, for each bucket of one shape."""
    return [seconds for bucket in BUCKETS for seconds in ((2.0, 1.0) if bucket in tokens else (1.0, 1.0))]


@pytest.fixture
def by_kernels(monkeypatch) -> list[int]:
    """The numbers of tokens that the kernels multiply."""
    counts, compute = list[int](), SkinnyLinear.by_kernels

    def counted(linear: SkinnyLinear, x: torch.Tensor, activation: str | None = None) -> torch.Tensor:
        counts.append(len(x))
        return compute(linear, x, activation)

    monkeypatch.setattr(SkinnyLinear, "by_kernels", counted)
    return counts


@pytest.mark.parametrize("slower", [(), (16,), (1, 64), BUCKETS])
def test_the_faster_one_computes_a_product(slower, by_kernels, caplog):
    caplog.set_level("INFO")
    linears, [made] = make_linears((32, 64))
    linears.measure(128, timed(kernels_slower_for(*slower)))
    by_kernels.clear()
    for tokens in (1, 2, 16, 17, 40, 65):
        made(torch.randn(tokens, 64, dtype=BF16, device=DEVICE))
    bucket_of = {1: 1, 2: 16, 16: 16, 17: 32, 40: 64}
    assert by_kernels == [tokens for tokens, bucket in bucket_of.items() if bucket not in slower]
    texts = {1: "1", 16: "2-16", 32: "17-32", 64: "33-64"}
    told = (
        "32 x 64 of " + ", ".join(texts[bucket] for bucket in slower) + " tokens" if slower else "the kernels compute"
    )
    assert told in caplog.text


def test_both_ways_give_the_same_with_the_activation():
    _, [made] = make_linears((48, 64))
    for tokens in (1, 5):
        x = torch.randn(tokens, 64, dtype=BF16, device=DEVICE)
        for activation in (None, "silu"):
            assert_close(made.by_torch(x, activation), made.by_kernels(x, activation), rtol=2**-5, atol=2**-4)


def test_before_anything_is_measured_the_kernels_compute(by_kernels):
    linears, [made] = make_linears((32, 64))
    made(torch.randn(3, 64, dtype=BF16, device=DEVICE))
    assert by_kernels == [3]
    assert linears.choice.measured == []


def test_bits_that_must_not_change_are_not_measured():
    linears, _ = make_linears((32, 64), deterministic=True)
    linears.measure(128, timed([]))
    assert linears.choice.measured == []


def test_fp32_has_kernels_for_one_token_only():
    linears, [made] = make_linears((32, 64), dtype=torch.float32)
    linears.measure(128, timed([2.0, 1.0]))
    assert [each.form for each in linears.choice.measured] == [ProductForm(32, 64, 1)]
    assert not made.computes(torch.randn(1, 64, device=DEVICE))


def test_weights_of_a_shape_share_a_choice_and_are_measured_together(by_kernels):
    linears, [one, other, _] = make_linears((32, 64), (32, 64), (16, 64))
    ways = []

    def seconds_of(run: Callable[[], object]) -> float:
        by_kernels.clear()
        run()
        ways.append(list(by_kernels))
        return 2.0 - len(ways) % 2  # torch takes longer

    linears.measure(1, seconds_of)
    assert ways == [[1, 1], [], [1], []]
    assert [each.kernels_s for each in linears.choice.measured] == [0.5, 1.0]
    x = torch.randn(1, 64, dtype=BF16, device=DEVICE)
    assert one.computes(x)
    assert other.computes(x)


def test_only_as_many_tokens_as_a_step_has_are_measured():
    linears, _ = make_linears((32, 64))
    linears.measure(20, timed([1.0] * 6))
    assert [each.form.max_tokens for each in linears.choice.measured] == [1, 16, 32]


def candidates(*rows: int) -> list[ProductCandidates]:
    return [ProductCandidates(ProductForm(number, 8, 1), lambda: None, lambda: None) for number in rows]


def test_no_measurement_begins_after_a_second(caplog):
    caplog.set_level("INFO")
    choice, now = ProductChoice(), iter([0.0, SECONDS / 2, 5.0, 5.0 + SECONDS])
    choice.measure(candidates(1, 2, 3), timed([2.0, 1.0] * 2), SingleRank().least, lambda: next(now))
    assert [each.is_torchs for each in choice.measured] == [True, True]
    assert not choice.is_torchs(3, 8, 1)
    assert "1 were not measured" in caplog.text


def test_a_measurement_that_fails_leaves_the_rest_to_the_kernels(caplog):
    left = [2.0, 1.0]

    def seconds_of(run: Callable[[], object]) -> float:
        if not left:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return left.pop(0)

    choice = ProductChoice()
    choice.measure(candidates(1, 2, 3), seconds_of, SingleRank().least)
    assert [choice.is_torchs(rows, 8, 1) for rows in (1, 2, 3)] == [True, False, False]
    assert caplog.text.count("cannot be measured: CUDA out of memory") == 1


def test_ranks_choose_torch_only_if_it_is_faster_on_all():
    """Another rank has other times: it finds torch slower for the second product."""
    choice, others = ProductChoice(), iter([2, -2, 1, 0])
    choice.measure(candidates(1, 2), timed([2.0, 1.0] * 2), lambda own: min(own, next(others)))
    assert [choice.is_torchs(rows, 8, 1) for rows in (1, 2)] == [True, False]


def test_ranks_with_other_products_leave_them_to_the_kernels():
    choice, others = ProductChoice(), iter([1, -1])
    choice.measure(candidates(1, 2), timed([2.0, 1.0] * 2), lambda own: min(own, next(others)))
    assert [each.is_torchs for each in choice.measured] == [False, False]


def test_a_rank_without_such_products_answers_the_others():
    answers = iter([1, -1])
    ProductChoice().measure([], timed([]), lambda own: min(own, next(answers)))
    assert next(answers, None) is None


def test_gate_and_up_are_measured_with_their_activation(monkeypatch):
    """The model says which they are, also where LoRA adapters are around them."""
    linears, [gate_up, down] = make_linears((48, 64), (64, 24))
    layer = SimpleNamespace(mlp=Mlp(gate_up, down, lambda x: x))
    spec = SimpleNamespace(gated_mlp=True, activation=Activation.SILU)
    model: Any = SimpleNamespace(_weights=SimpleNamespace(layers=[layer]), _spec=spec)
    monkeypatch.setitem(vars(linear_module), "_call_all", lambda calls: [call() for call in calls])
    activations = dict(CudaModel._activations(model))
    assert activations == {(48, 64): "silu"}
    widths = list[int]()

    def seconds_of(run: Callable[[], Any]) -> float:
        widths.extend(y.shape[1] for y in run())
        return 1.0

    linears.measure(1, seconds_of, activations=activations)
    assert widths == [24, 24, 64, 64]


@pytest.mark.gpu
def test_a_gpu_says_which_is_faster():
    linears, [made, *_] = make_linears(*[(4096, 4096)] * 4)
    linears.measure(64)
    assert [each.form.max_tokens for each in linears.choice.measured] == list(BUCKETS)
    for each in linears.choice.measured:
        assert 0 < each.kernels_s < 1e-3
        assert 0 < each.torch_s < 1e-3
        x = torch.randn(each.form.max_tokens, 4096, dtype=BF16, device=DEVICE)
        assert_close(made(x), made.by_torch(x), rtol=2**-6, atol=0.5)

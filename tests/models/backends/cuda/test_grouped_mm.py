"""Experts of many tokens by torch's ``grouped_mm`` where it is faster. No GPU is here to say where, so the tests do."""

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

if not find_spec("triton"):
    pytest.skip("needs Triton, which has wheels only for Linux", allow_module_level=True)

from penstock.kernels.cuda.model_shapes import Mixture
from penstock.kernels.cuda.moe.fused_moe import ExpertsWeights, ExpertsWorkspace, fused_moe
from penstock.kernels.cuda.moe.grouped_mm import grouped_moe, grouped_moe_bytes, has_grouped_mm
from penstock.kernels.cuda.moe.shapes import ExpertsShape
from penstock.models.backends.cuda import experts
from penstock.models.backends.cuda.experts import ExpertLayers
from penstock.models.backends.tensor_parallel import SingleRank

# numpy's, in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
MIXTURE = Mixture(num_experts=5, per_token=2, normalise=True)
SHAPE = ExpertsShape(MIXTURE, 40, 24, BF16, BF16)


def arguments(tokens: int, live: int) -> Any:
    """Those of ``fused_moe``, for a step whose last tokens have no sequence. The fourth expert gets no token."""
    torch.manual_seed(0)

    def made(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(sizes, device=DEVICE).mul_(scale).to(BF16)

    weights = ExpertsWeights(made(5, 48, 40, scale=40**-0.5), made(5, 40, 24, scale=24**-0.5))
    logits = made(tokens, 5)
    logits[:, 3] = -100
    query_starts = torch.tensor([0, live // 2, live], dtype=torch.int32, device=DEVICE)
    room = ExpertsWorkspace.allocate(SHAPE, tokens, DEVICE)
    room.routes.pairs.fill_(1 << 30)  # what no step has written yet
    return SHAPE, made(tokens, 40), logits, weights, query_starts, room


@pytest.mark.parametrize("live", [40, 29, 0])
def test_both_give_the_same(live):
    shape, x, logits, weights, query_starts, room = arguments(40, live)
    expected, out = (torch.full((40, 40), 7.0, dtype=BF16, device=DEVICE) for _ in range(2))
    fused_moe(shape, x, logits, weights, query_starts, room, expected)
    grouped_moe(shape, x, logits, weights, query_starts, room, out)
    assert_close(out, expected, rtol=2**-6, atol=2**-6)
    assert (out[live:] == 7.0).all(), "tokens without a sequence are not written"


@pytest.mark.skipif(DEVICE.type == "cuda", reason="is about recordings without a GPU")
def test_a_graph_can_capture_it(monkeypatch):
    from without_gpu.capture_checks import Capture, check_captures

    check_captures(monkeypatch)
    shape, x, logits, weights, query_starts, room = arguments(33, 0)
    with Capture():
        grouped_moe(shape, x, logits, weights, query_starts, room, torch.zeros_like(x))


@pytest.mark.parametrize(
    ("changes", "can"),
    [
        ({}, True),
        ({"dtype": torch.float16, "logits_dtype": torch.float16}, False),
        ({"mixture": replace(MIXTURE, biased=True)}, False),
        ({"mixture": replace(MIXTURE, scales_inputs=True)}, False),
        ({"clamped_gate": (1.7, 7.0)}, False),
        ({"gated": False, "activation": "relu_squared"}, False),
        ({"deterministic": True}, False),
        ({"intermediate_size": 20}, False),  # rows that are not aligned
        ({"hidden_size": 64, "intermediate_size": 32, "is_fp4": True}, False),
    ],
)
def test_what_torch_can_multiply(changes, can):
    assert has_grouped_mm(replace(SHAPE, **changes), torch.device("cpu")) == can


@pytest.mark.parametrize(("capability", "can"), [(80, False), (89, False), (90, True), (100, True), (120, False)])
def test_gpus_for_which_torch_has_a_kernel(capability, can, monkeypatch):
    """On others it would read the groups' sizes on the host, which a graph cannot capture."""
    monkeypatch.setattr("penstock.kernels.cuda.moe.grouped_mm.capability_of", lambda device: capability)
    assert has_grouped_mm(SHAPE, torch.device("cuda")) == can


class Layers(ExpertLayers):
    """Experts without a model."""

    def __init__(self, weights: ExpertsWeights, room: ExpertsWorkspace) -> None:
        self._shape, self._room, self._min_grouped_tokens = SHAPE, room, math.inf
        self._mlps: Any = [weights]


@pytest.fixture
def layers(monkeypatch) -> Layers:
    monkeypatch.setattr(experts, "_kernel_weights", lambda weights: weights)
    *_, weights, _, room = arguments(8, 8)
    return Layers(weights, room)


def timed(*seconds: float) -> Callable[[Callable[[], object]], float]:
    """A clock that tells these times one after another, and runs nothing."""
    left = list(seconds)
    return lambda run: left.pop(0)


@pytest.mark.parametrize(
    ("seconds", "max_tokens", "least"),
    [
        ((2.0, 1.0, 2.0, 1.0, 2.0, 1.0), 8192, 512),
        ((2.0, 1.0, 1.0, 1.0), 8192, 8192),  # not with fewer
        ((1.0, 1.0), 8192, math.inf),
        ((2.0, 1.0, 1.0, 1.0), 2048, 2048),
        ((), 511, math.inf),
    ],
)
def test_torch_multiplies_from_where_it_is_faster(seconds, max_tokens, least, layers, caplog):
    caplog.set_level("INFO")
    layers.measure(max_tokens, timed(*seconds))
    assert layers._min_grouped_tokens == least
    assert (f"grouped_mm multiplies {least} tokens" in caplog.text) == (least < math.inf)


def test_all_ranks_choose_the_same(layers):
    """Another rank found that torch is faster only from 2,048 tokens on."""

    class Rank(SingleRank):
        def least(self, number: int) -> int:
            return min(number, -2048)

    layers.measure(2048, timed(2.0, 1.0, 2.0, 1.0), Rank())
    assert layers._min_grouped_tokens == 2048


def test_a_torch_that_cannot_multiply_here_is_left_out(layers, monkeypatch, caplog):
    caplog.set_level("INFO")

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("grouped gemm is not supported on this device")

    monkeypatch.setattr(functional, "grouped_mm", refuse)
    times = iter([1.0])

    def seconds_of(run: Any) -> float:
        if run.func is grouped_moe:
            refuse()
        return next(times)

    layers.measure(512, seconds_of)
    assert layers._min_grouped_tokens == math.inf
    assert "grouped gemm is not supported" in caplog.text


def test_memory_that_graphs_need_is_left_to_them(layers, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(experts, "free_bytes", lambda device: 4 * grouped_moe_bytes(SHAPE, 2048))
    layers.measure(8192, timed())
    assert layers._min_grouped_tokens == math.inf
    assert "it needs more memory for 8192 tokens" in caplog.text
    layers.measure(2048, timed(2.0, 1.0, 2.0, 1.0))
    assert layers._min_grouped_tokens == 512


def test_a_layer_uses_what_was_chosen(layers, monkeypatch):
    used = []
    for function in (fused_moe, grouped_moe):
        name = function.__name__
        monkeypatch.setattr(experts, name, lambda *_, name=name: used.append(name))
    layers._spec = type("Plain", (), {"is_plain_softmax": True})
    layers._min_grouped_tokens = 512
    mlp: Any = type("Mlp", (), {"router": lambda x: x, "add_shared": lambda x, out: out, "scales_inputs": False})
    for tokens in (511, 512):
        layers.compute(mlp, torch.zeros(tokens, 40), torch.tensor([0, tokens]))
    assert used == ["fused_moe", "grouped_moe"]


@pytest.mark.gpu
def test_one_graph_serves_any_routing_at_size():
    mixture = Mixture(num_experts=128, per_token=8, normalise=True)
    shape, tokens = ExpertsShape(mixture, 2048, 768, BF16, BF16), 2048
    if not has_grouped_mm(shape, DEVICE):
        pytest.skip("torch has no kernel for this GPU")
    weights = ExpertsWeights(
        torch.randn(128, 1536, 2048, dtype=BF16, device=DEVICE).mul_(2048**-0.5),
        torch.randn(128, 2048, 768, dtype=BF16, device=DEVICE).mul_(768**-0.5),
    )
    room = ExpertsWorkspace.allocate(shape, tokens, DEVICE)
    x, logits = (
        torch.zeros(tokens, 2048, dtype=BF16, device=DEVICE),
        torch.zeros(tokens, 128, dtype=BF16, device=DEVICE),
    )
    query_starts = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    expected, out = torch.zeros_like(x), torch.zeros_like(x)
    grouped_moe(shape, x, logits, weights, query_starts, room, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_moe(shape, x, logits, weights, query_starts, room, out)
    for live in (tokens, 1000):
        x.normal_()
        logits.normal_()
        query_starts[1] = live
        graph.replay()
        fused_moe(shape, x, logits, weights, query_starts, room, expected)
        assert_close(out[:live], expected[:live], rtol=2**-5, atol=2**-5)

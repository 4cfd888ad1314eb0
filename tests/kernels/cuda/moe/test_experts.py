"""Mixtures of experts against the model's own in torch, in fp64; and what a token's result must not depend on."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from penstock.kernels.cuda.example_shapes import SHAPES
from penstock.kernels.cuda.model_shapes import Mixture
from penstock.kernels.cuda.moe.fused_moe import ExpertsWeights, ExpertsWorkspace, fused_moe
from penstock.kernels.cuda.moe.shapes import DECODE, MIDDLE, PREFILL, PREFILL_NARROW, ExpertsShape
from penstock.kernels.reference import ops as reference
from penstock.models.backends.torch_common.weights import ExpertMlp

# numpy's, in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

ULP = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def make_shape(num_experts, per_token, hidden_size, intermediate_size, dtype=torch.float32, biased=False, **changes):
    mixture = Mixture(num_experts=num_experts, per_token=per_token, normalise=True, biased=biased)
    return ExpertsShape(mixture, hidden_size, intermediate_size, dtype, dtype, **changes)


def random_weights(shape, device):
    experts, hidden, inner = shape.mixture.num_experts, shape.hidden_size, shape.intermediate_size

    def made(*sizes, scale):
        return torch.randn(sizes, device=device).mul_(scale).to(shape.dtype)

    biases = [made(experts, width, scale=1) if shape.mixture.biased else None for width in (shape.first_rows, hidden)]
    if shape.is_fp4:
        codes = [torch.randint(0, 256, sizes, dtype=torch.uint8, device=device)
                 for sizes in ((experts, 2 * inner, hidden // 2), (experts, hidden, inner // 2))]  # fmt: skip
        exponents = [torch.randint(0, 2, (*part.shape[:2], part.shape[2] // 16), device=device) for part in codes]
        exponents = [part.add_(124).to(torch.uint8) for part in exponents]
        return ExpertsWeights(*codes, *biases, *exponents)
    gate_up = made(experts, shape.first_rows, hidden, scale=3 * hidden**-0.5)  # some beyond a gate's limit
    return ExpertsWeights(gate_up, made(experts, hidden, inner, scale=inner**-0.5), *biases)


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def dequantised(codes, exponents, dtype):
    """What transformers makes of MXFP4."""
    if exponents is None:
        return codes.to(dtype)
    both = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    values = torch.tensor(E2M1, dtype=dtype, device=codes.device)[both].unflatten(-1, (-1, 32))
    return torch.ldexp(values, exponents.unsqueeze(-1).int() - 127).flatten(-2)


def random_inputs(shape, tokens, device):
    """x and logits."""
    x = torch.randn(tokens, shape.hidden_size, device=device).to(shape.dtype)
    return x, torch.randn(tokens, shape.mixture.num_experts, device=device).mul(2).to(shape.logits_dtype)


def run(shape, x, logits, weights, num_live=None, room=None, out=None):
    live = len(x) if num_live is None else num_live
    query_starts = torch.tensor([0, live // 2, live], dtype=torch.int32, device=x.device)
    if room is None:
        room = ExpertsWorkspace.allocate(shape, len(x), x.device)
        room.parts.fill_(torch.nan)
        room.activations.fill_(torch.nan)
    out = torch.full_like(x, torch.nan) if out is None else out
    fused_moe(shape, x, logits, weights, query_starts, room, out)
    return out


def expected_of(shape, x, logits, weights, dtype=torch.float64):
    if not shape.gated:
        activation = partial(reference.activate, activation=shape.activation)
    elif shape.clamped_gate is None:
        activation = partial(reference.gated_activation, activation=shape.activation)
    else:
        activation = partial(reference.clamped_gate, alpha=shape.clamped_gate[0], limit=shape.clamped_gate[1])

    gate_up_bias, down_bias = (
        None if bias is None else bias.to(dtype) for bias in (weights.gate_up_bias, weights.down_bias)
    )
    mlp = ExpertMlp(
        router=lambda _: logits.to(dtype),
        gate_up=dequantised(weights.gate_up, weights.gate_up_exponents, dtype),
        down=dequantised(weights.down, weights.down_exponents, dtype),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=activation,
        choose=partial(reference.choose_experts, num_chosen=shape.mixture.per_token, normalise=shape.mixture.normalise),
        shared=None,
        shared_gate=None,
        scales_inputs=shape.mixture.scales_inputs,
    )
    return mlp(x.to(dtype))


def check_mixture(shape, inputs, weights, dtype=torch.float64):
    """``dtype`` is that of the reference."""
    x, logits = inputs
    expected = expected_of(shape, x, logits, weights, dtype)
    out = run(shape, x, logits, weights)
    ulp = ULP[shape.dtype]
    assert_close(out.to(dtype), expected, rtol=2 * ulp, atol=4 * ulp * float(expected.square().mean().sqrt()))


FP32, BF16, FP16 = ULP
UNGATED = {"gated": False, "activation": "relu_squared"}


@pytest.mark.parametrize(
    ("tokens", "sizes", "changes"),
    [
        (1, (4, 2, 40, 24, BF16), {}),
        (7, (5, 3, 136, 72, FP16), {"activation": "gelu"}),  # several blocks of columns and of a row, the last in part
        (7, (5, 3, 33, 35, FP32), {"activation": "gelu_tanh"}),
        (9, (6, 4, 72, 136, BF16, True), {"clamped_gate": (1.702, 1.0)}),
        (12, (24, 4, 72, 40, FP32), {}),  # more tiles than are multiplied together
        (20, (3, 1, 64, 128, BF16), {}),
        (7, (5, 3, 136, 72, BF16), UNGATED),
        (20, (3, 3, 64, 35, FP32, True), UNGATED),
        (130, (2, 2, 40, 136, FP16), UNGATED),
        (20, (3, 3, 64, 64, FP32, True), {"deterministic": True}),
        (130, (2, 2, 40, 136, BF16), {}),
        (130, (2, 2, 40, 136, FP32), {}),
        (3, (4, 2, 96, 160, BF16, True), {"clamped_gate": (1.702, 1.0), "is_fp4": True}),
        (7, (5, 3, 64, 32, FP32), {"is_fp4": True}),
        (40, (2, 2, 160, 64, FP16), {"is_fp4": True, "deterministic": True}),
    ],
)
def test_mixture(tokens, sizes, changes, device):
    shape = make_shape(*sizes, **changes)
    check_mixture(shape, random_inputs(shape, tokens, device), random_weights(shape, device))


def test_probabilities_as_they_are(device):
    shape = make_shape(5, 2, 40, 24)
    shape = replace(shape, mixture=replace(shape.mixture, normalise=False))
    check_mixture(shape, random_inputs(shape, 6, device), random_weights(shape, device))


@pytest.mark.parametrize(("tokens", "sizes"), [(6, (5, 2, 40, 24)), (20, (3, 1, 64, 136, torch.bfloat16, True))])
def test_weights_of_the_inputs(tokens, sizes, device):
    shape = make_shape(*sizes)
    shape = replace(shape, mixture=replace(shape.mixture, scales_inputs=True))
    check_mixture(shape, random_inputs(shape, tokens, device), random_weights(shape, device))


def test_logits_in_fp32(device):
    shape = make_shape(5, 2, 40, 24, torch.bfloat16)
    shape = replace(shape, logits_dtype=torch.float32)
    check_mixture(shape, random_inputs(shape, 6, device), random_weights(shape, device))


def test_experts_without_tokens_and_with_all(device):
    shape = make_shape(9, 2, 40, 24)
    x, logits = random_inputs(shape, 34, device)
    logits[:, [3, 7]] += 100
    weights = random_weights(shape, device)
    check_mixture(shape, (x, logits), weights)
    for unused in (0, 8):  # may hold anything
        weights.gate_up[unused] = weights.down[unused] = torch.nan
    assert run(shape, x, logits, weights).isfinite().all()


def test_a_token_s_bits_are_the_same_in_every_batch(device, rows_alike):
    shape = make_shape(4, 2, 136, 72, deterministic=True)
    x, logits = random_inputs(shape, 50, device)
    weights = random_weights(shape, device)
    together = run(shape, x, logits, weights)
    order = torch.randperm(50, device=device)
    assert torch.equal(run(shape, x[order], logits[order], weights), together[order])
    for some in (slice(1), slice(30, 37)):
        assert torch.equal(run(shape, x[some], logits[some], weights), together[some])


@pytest.mark.parametrize("changes", [{"clamped_gate": (1.702, 7.0)}, UNGATED])
def test_a_token_s_faults_are_its_own(changes, device):
    shape = make_shape(4, 2, 40, 24, **changes)
    x, logits = random_inputs(shape, 6, device)
    x[2], x[3], logits[5] = torch.nan, torch.inf, torch.nan
    out = run(shape, x, logits, random_weights(shape, device))
    assert out.isnan().any(dim=1).tolist() == [False, False, True, True, False, True]
    assert out[5].isnan().all()


def test_tokens_that_do_not_count_are_kept(device):
    shape = make_shape(4, 2, 40, 24)
    x, logits = random_inputs(shape, 6, device)
    weights = random_weights(shape, device)
    expected = run(shape, x[:4], logits[:4], weights)
    x[4:] = logits[4:] = torch.nan
    kept = torch.arange(6.0, device=device).unsqueeze(1).expand(6, 40).contiguous()
    out = run(shape, x, logits, weights, num_live=4, out=kept.clone())
    assert torch.equal(out[:4], expected)
    assert torch.equal(out[4:], kept[4:])
    assert torch.equal(run(shape, x, logits, weights, num_live=0, out=kept.clone()), kept)


def test_a_room_serves_smaller_steps_and_layers_in_place(device):
    shape = make_shape(4, 2, 40, 24)
    room = ExpertsWorkspace.allocate(shape, 40, device)
    for tokens in (40, 3, 17):
        x, logits = random_inputs(shape, tokens, device)
        weights = random_weights(shape, device)
        expected = run(shape, x, logits, weights)
        assert torch.equal(run(shape, x, logits, weights, room=room, out=x), expected)
        assert torch.equal(x, expected)


def test_tiles_follow_the_pairs_of_an_expert():
    qwen = ExpertsShape.of(SHAPES["Qwen3-30B-A3B"])
    assert [qwen.tiles(tokens) for tokens in (1, 128, 129, 1024, 1025)] == [DECODE] * 2 + [MIDDLE] * 2 + [PREFILL]
    assert replace(qwen, dtype=FP32, logits_dtype=FP32).tiles(8192) == MIDDLE
    always = replace(qwen, deterministic=True)
    assert {always.tiles(tokens) for tokens in (1, 128, 1025, 8192)} == set(always.all_tiles) == {MIDDLE}
    assert replace(qwen, wide_products=False).tiles(1025) == PREFILL_NARROW
    assert ExpertsShape.of(replace(SHAPES["Qwen3-30B-A3B"], wide_products=False)).tiles(1025) == PREFILL_NARROW


@pytest.mark.parametrize("is_fp4", [False, True])
def test_tiles_without_wide_products(is_fp4, device):
    shape = make_shape(2, 2, 96, 64, torch.bfloat16, is_fp4=is_fp4, wide_products=False)
    assert shape.tiles(70) == PREFILL_NARROW
    check_mixture(shape, random_inputs(shape, 70, device), random_weights(shape, device))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 17, 300, 4096])
@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "Mixtral-8x7B", "gpt-oss-20b", "gpt-oss-20b-mxfp4"])
def test_mixture_at_size(model, tokens, device):
    shape = ExpertsShape.of(SHAPES[model])
    x, logits = random_inputs(shape, tokens, device)
    weights = random_weights(shape, device)
    check_mixture(shape, (x, logits), weights, torch.float32)
    always = replace(shape, deterministic=True)
    check_mixture(always, (x, logits), weights, torch.float32)
    assert torch.equal(run(always, x[-1:], logits[-1:], weights), run(always, x, logits, weights)[-1:])


@pytest.mark.gpu
def test_one_graph_serves_any_routing(device):
    shape = make_shape(16, 2, 256, 128, BF16)
    weights, room = random_weights(shape, device), ExpertsWorkspace.allocate(shape, 64, device)
    x, logits = random_inputs(shape, 64, device)
    query_starts, out = torch.tensor([0, 64], dtype=torch.int32, device=device), torch.empty_like(x)
    fused_moe(shape, x, logits, weights, query_starts, room, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused_moe(shape, x, logits, weights, query_starts, room, out)
    for num_live in (64, 1, 40):
        for held, new in zip((x, logits), random_inputs(shape, 64, device), strict=True):
            held.copy_(new)
        query_starts[1] = num_live
        graph.replay()
        assert torch.equal(out[:num_live], run(shape, x, logits, weights, num_live)[:num_live])


def test_what_does_not_fit_is_refused(device):
    shape = make_shape(4, 2, 40, 24)
    x, logits = random_inputs(shape, 3, device)
    weights = random_weights(shape, device)
    with pytest.raises(AssertionError):
        run(shape, x[:, :39].contiguous(), logits, weights)
    with pytest.raises(AssertionError):
        run(shape, x, logits.bfloat16(), weights)
    with pytest.raises(AssertionError):
        run(shape, x, logits, replace(weights, down_bias=weights.down[:, :, 0].contiguous()))
    with pytest.raises(AssertionError):
        run(shape, x, logits, weights, room=ExpertsWorkspace.allocate(shape, 2, device))
    fewer_tiles = ExpertsWorkspace.allocate(make_shape(1, 1, 40, 24), 6, device)
    with pytest.raises(AssertionError):
        run(shape, x, logits, weights, room=fewer_tiles)
    with pytest.raises(AssertionError):
        replace(shape, logits_dtype=torch.float16)
    with pytest.raises(AssertionError):
        replace(shape, is_fp4=True)  # groups of 32 do not fit
    with pytest.raises(AssertionError):
        replace(shape, gated=False, clamped_gate=(1.702, 7.0))

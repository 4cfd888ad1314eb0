"""Which experts tokens go to, and the order of their pairs: compared for equality, except the weights."""

import random

import pytest
import torch
from torch.testing import assert_close

from penstock.kernels.cuda.model_shapes import Mixture
from penstock.kernels.cuda.moe.routing import Routes, route
from penstock.kernels.cuda.moe.shapes import ExpertsShape
from penstock.kernels.reference.ops import choose_experts

# numpy's, in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def make_routes(mixture, max_tokens, device):
    """Poisoned."""
    shape = ExpertsShape(mixture, 16, 16, torch.float32, torch.float32)
    routes = Routes.allocate(shape, max_tokens, device)
    for tensor in vars(routes).values():
        tensor.fill_(-7)
    return routes


def run_route(mixture, logits, block_m, num_live):
    query_starts = torch.tensor([0, num_live // 2, num_live], dtype=torch.int32, device=logits.device)
    routes = make_routes(mixture, logits.shape[0], logits.device)
    route(mixture, block_m, logits, query_starts, routes)
    return routes


def check_route(mixture, logits, block_m, num_live=None):
    num_live = len(logits) if num_live is None else num_live
    routes = run_route(mixture, logits, block_m, num_live)
    live = slice(num_live)
    chosen, weights = choose_experts(logits[live], mixture.per_token, mixture.normalise)
    assert torch.equal(routes.ids[live].long(), chosen)
    assert_close(routes.weights[live], weights, rtol=1e-5, atol=1e-7)
    assert (routes.ids[num_live:] == -1).all()

    # Pairs of an expert stand together, in the order of tokens; sorting is stable.
    order = chosen.flatten().sort(stable=True)
    assert routes.pairs[: chosen.numel()].tolist() == order.indices.tolist()
    expected, begin = [], 0
    for expert, count in enumerate(chosen.flatten().bincount(minlength=mixture.num_experts).tolist()):
        end = begin + count
        expected += [(expert, first, end) for first in range(begin, end, block_m)]
        begin = end
    (num_tiles,) = routes.num_tiles.tolist()
    assert [tuple(tile) for tile in routes.tiles[:num_tiles].tolist()] == expected
    assert (routes.tiles[num_tiles:] == -7).all()


@pytest.mark.parametrize(("dtype", "normalise"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize(("num_experts", "per_token", "tokens"), [(8, 2, 1), (5, 3, 40), (60, 4, 70), (256, 8, 33)])
def test_route(num_experts, per_token, tokens, dtype, normalise, device):
    mixture = Mixture(num_experts=num_experts, per_token=per_token, normalise=normalise)
    # In bf16, many of a token's are equal.
    check_route(mixture, torch.randn(tokens, num_experts, device=device).mul(3).to(dtype), 16)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 32, 1000, 8192])
@pytest.mark.parametrize(("num_experts", "per_token"), [(8, 2), (32, 4), (128, 8), (256, 8)])
def test_route_at_size(num_experts, per_token, tokens, device):
    mixture = Mixture(num_experts=num_experts, per_token=per_token, normalise=True)
    logits = torch.randn(tokens, num_experts, device=device).mul(3).bfloat16()
    for block_m in (16, 64, 128):
        check_route(mixture, logits, block_m)
    check_route(mixture, logits, 64, tokens // 2)


@pytest.mark.parametrize("num_live", [0, 1, 32, 35])
def test_tokens_that_do_not_count_have_no_experts(num_live, device):
    check_route(Mixture(num_experts=6, per_token=2, normalise=True), torch.randn(70, 6, device=device), 16, num_live)


def test_all_tokens_to_the_same_experts(device):
    logits = torch.zeros(100, 20, device=device)
    logits[:, 13], logits[:, 4] = 5, 4
    check_route(Mixture(num_experts=20, per_token=2, normalise=False), logits, 16)


def test_equal_logits_go_to_the_first_experts(device):
    logits = torch.zeros(2, 12, device=device)
    logits[0, 1::2] = -0.0
    logits[1, 5:9] = -torch.inf
    mixture = Mixture(num_experts=12, per_token=9, normalise=True)
    assert run_route(mixture, logits, 16, 2).ids.tolist() == [[*range(9)], [*range(5), *range(9, 12), 5]]
    check_route(mixture, logits, 16)


def test_nan_logits_give_nan_weights_only_to_their_token(device):
    logits = torch.randn(4, 6, device=device)
    logits[1, 2] = -torch.nan
    logits[2] = torch.nan
    routes = run_route(Mixture(num_experts=6, per_token=2, normalise=True), logits, 16, 4)
    assert routes.weights.isnan().tolist() == [[False] * 2, [True] * 2, [True] * 2, [False] * 2]
    assert routes.ids.min() >= 0
    assert routes.ids.max() < 6
    assert sorted(routes.pairs.tolist()) == list(range(8))


def test_no_routing_has_more_tiles_than_there_is_room_for():
    numbers = random.Random(0)
    for _ in range(200):
        num_experts, block_m = numbers.randint(2, 20), numbers.choice([16, 64])
        per_token, tokens = numbers.randint(1, num_experts), numbers.randint(1, 200)
        mixture = Mixture(num_experts=num_experts, per_token=per_token, normalise=True)
        shape = ExpertsShape(mixture, 16, 16, torch.float32, torch.float32)
        crowd = numbers.randint(per_token, num_experts)  # all tokens go to these
        counts = [0] * num_experts
        for _ in range(tokens):
            for expert in numbers.sample(range(crowd), per_token):
                counts[expert] += 1
        assert sum(-(-count // block_m) for count in counts) <= shape.max_tiles(tokens, block_m)
    # ... and there is not much more room than some need.
    assert shape.max_tiles(1, 16) == per_token


def test_what_does_not_fit_is_refused(device):
    mixture = Mixture(num_experts=6, per_token=2, normalise=True)
    routes, starts = make_routes(mixture, 4, device), torch.tensor([0, 4], dtype=torch.int32, device=device)
    with pytest.raises(AssertionError):
        route(mixture, 16, torch.zeros(4, 7, device=device), starts, routes)
    with pytest.raises(AssertionError):
        route(mixture, 16, torch.zeros(5, 6, device=device), starts, routes)
    with pytest.raises(AssertionError):
        route(mixture, 16, torch.zeros(4, 6, device=device), starts.long(), routes)

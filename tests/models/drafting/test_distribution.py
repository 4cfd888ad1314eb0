"""Tokens that are verified against drafts have the target's own distribution, whatever is drafted: by a chi-square test
over fixed seeds, against what transformers computes in float64."""

import copy

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from penstock.models.backends.base import load_backend
from penstock.models.batch.batch import Sampled
from penstock.models.worker import runner
from penstock.models.worker.speculation import check_speculation, make_drafter
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.worker_config import DraftMethod

from .kits import speculation_of

pytestmark = pytest.mark.usefixtures("cpu_library")

VOCAB, PROMPT = 4, [1, 3, 2]
NUM_VERIFIED, MAX_DRAFTS = 4, 2
NUM_DRAWS = 100_000
ROWS = 2_500
"""At once."""
WAYS = {"whole": SamplingParams(temperature=1.5), "filtered": SamplingParams(temperature=1.2, top_p=0.9)}


def probabilities(module, sampling):
    """(VOCAB,) * (1 + NUM_VERIFIED): of each sequence of so many tokens after the prompt."""
    sequences = torch.cartesian_prod(*[torch.arange(VOCAB)] * NUM_VERIFIED)
    prompts = torch.tensor([PROMPT]).expand(len(sequences), -1)
    with torch.inference_mode():
        logits = copy.deepcopy(module).double()(torch.cat((prompts, sequences), 1)).logits[:, len(PROMPT) - 1 :]
    probability = (logits / sampling.temperature).softmax(-1)
    ranked, order = probability.sort(-1, descending=True)
    ranked[ranked.cumsum(-1) - ranked >= sampling.top_p] = 0.0
    probability = torch.zeros_like(probability).scatter(-1, order, ranked)
    probability /= probability.sum(-1, keepdim=True)
    joint = torch.ones((), dtype=torch.float64)
    for length in range(NUM_VERIFIED + 1):
        # What follows the first tokens is the same whatever follows those.
        after = probability[:: VOCAB ** (NUM_VERIFIED - length), length].view((VOCAB,) * (length + 1))
        joint = joint.unsqueeze(-1) * after
    return joint


def p_value(counts, probability):
    """Of a chi-square test of how often each thing came. What is expected less than five times counts as one."""
    expected = counts.sum() * probability.ravel()
    order = expected.argsort()
    expected, observed = expected[order], counts.ravel()[order]
    if observed[expected == 0].any():
        return 0.0
    num_rare = max(1, int(np.count_nonzero(expected < 5)))
    while expected[:num_rare].sum() < 5:
        num_rare += 1
    starts = [0, *range(num_rare, len(expected))]
    expected, observed = np.add.reduceat(expected, starts), np.add.reduceat(observed, starts)
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert len(expected) > 100
    return float(torch.special.gammaincc(*torch.tensor([len(expected) - 1, statistic], dtype=torch.float64) / 2))


@pytest.fixture(scope="module")
def target(tmp_path_factory, build_model):
    return build_model(tmp_path_factory.mktemp("small"), "LlamaConfig", {"vocab_size": VOCAB})


@pytest.fixture
def draw(target, tmp_path, worker_config, eager, player, asked):
    """How often each sequence comes, all of whose tokens but the first are verified against drafts; and how many
    of these were right, and were not."""

    def draw(method, sampling, num_draws):
        speculation = speculation_of(method, tmp_path, target, tuple(range(VOCAB)), noise=0.5)
        config = worker_config(
            target.path, 4 * ROWS, backend="cpu", speculation=speculation, max_num_batched_tokens=len(PROMPT) * ROWS
        )
        config = check_speculation(config)
        backend = load_backend(config)
        playing = player(backend, eager(make_drafter(config, backend), MAX_DRAFTS))
        counts = np.zeros((VOCAB,) * (1 + NUM_VERIFIED))
        right = wrong = 0
        for first in range(0, num_draws // NUM_VERIFIED, ROWS):
            requests = [asked(PROMPT, replace(sampling, seed=first + row), MAX_DRAFTS) for row in range(ROWS)]
            for told in playing.run(requests, 1 + NUM_VERIFIED, room=ROWS * MAX_DRAFTS):
                counts[tuple(told.token_ids)] += 1
                right += told.num_accepted
                wrong += told.num_drafted - told.num_accepted
        assert counts.sum() * NUM_VERIFIED == num_draws
        return counts, right, wrong

    return draw


def check(target, draw, method, way):
    counts, right, wrong = draw(method, WAYS[way], NUM_DRAWS)
    assert min(right, wrong) > NUM_DRAWS // 10
    assert p_value(counts, probabilities(target.module, WAYS[way]).numpy()) > 0.001


def test_chi_square_of_100_000_draws(target, draw):
    """With a head, whose drafts know nothing of the noise."""
    check(target, draw, DraftMethod.EAGLE3, "whole")


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", [DraftMethod.DRAFT_MODEL, DraftMethod.EAGLE3])
def test_chi_square_of_each_way(target, draw, method, way):
    """A draft model draws with the same noise as the target."""
    check(target, draw, method, way)


@pytest.mark.parametrize("way", WAYS)
def test_chi_square_sees_drafts_that_are_always_accepted(target, draw, monkeypatch, way):
    def verified(row, drafts, sampled):
        return original(row, drafts, [*(Sampled(draft, None) for draft in drafts), sampled[-1]])

    original = runner._verified
    monkeypatch.setattr(runner, "_verified", verified)
    counts, _, wrong = draw(DraftMethod.EAGLE3, WAYS[way], NUM_DRAWS // 10)
    assert wrong == 0
    assert p_value(counts, probabilities(target.module, WAYS[way]).numpy()) < 1e-6

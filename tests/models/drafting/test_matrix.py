"""Greedy and seeded sampling, each drafter, several numbers of drafts, many prompts, families of models: over engine,
scheduler and worker, all that is told of the tokens is what is told without drafts, to the last bit."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.worker_config import DraftMethod

from .kits import speculation_of

pytestmark = pytest.mark.usefixtures("cpu_library")

NUM_TOKENS = 24
ALL = tuple(range(160))
FEW = (3, 30, 60, 90, 120, 150)
"""So that random models repeat themselves."""
TWO = (30, 90)
"""So that random heads are right now and then."""
METHODS = [method for method in DraftMethod if method is not DraftMethod.MTP]
"""Few models have an MTP head: tests/models/mtp."""


@dataclass(frozen=True)
class Asked:
    """A request of the matrix."""

    prompt: list[int]
    sampling: SamplingParams
    max_drafts: int

    @property
    def cell(self) -> tuple[bool, int]:
        """Whether it is greedy, and how many drafts it may have."""
        return self.sampling.temperature == 0.0, self.max_drafts


def asked(num_prompts: int, lengths: tuple[int, ...]) -> list[Asked]:
    """Each prompt, greedy and seeded, with each number of drafts. What follows is of the same tokens as the prompt;
    half of the prompts repeat themselves."""
    rng = np.random.default_rng(3)
    requests = []
    for number in range(num_prompts):
        tokens = (ALL, FEW, TWO)[number % 3]
        prompt = rng.choice(tokens, int(rng.integers(1, 50))).tolist() * (1 + number % 2)
        common: dict[str, Any] = {
            "allowed_token_ids": tokens if number % 3 else None,
            "logprobs": number % 4 or None,
            "frequency_penalty": 0.4 * (number % 5 == 4),
            "min_tokens": 12,
            "stop_token_ids": FEW[:3] if number % 6 == 1 else (),
        }
        seeded = SamplingParams(temperature=0.7, top_p=0.95, top_k=40 * (number % 2), seed=number, **common)
        for sampling in (SamplingParams(temperature=0.0, **common), seeded):
            requests += [Asked(prompt, sampling, length) for length in lengths]
    return requests


async def outputs(engine, requests, with_drafts=True):
    answers = [
        engine.submit(one.prompt, one.sampling, NUM_TOKENS, max_drafts=one.max_drafts if with_drafts else 0)
        for one in requests
    ]
    await engine.finish(answers)
    return answers


@pytest.fixture
def start(worker_config, in_process_executor, start_engine):
    """Starts an engine on a model."""

    async def start(model, speculation=None):
        config = worker_config(model.path, backend="cpu", dtype="bfloat16", speculation=speculation)
        return await start_engine(in_process_executor(config, is_eager=True), max_queued_requests=10_000)

    return start


async def check(model, directory, methods, start, requests):
    """Of each cell drafts are right, drafts are wrong, and as many as may be are computed."""
    alike = {(one.sampling, *one.prompt): one for one in requests}
    engine = await start(model)
    answers = await outputs(engine, list(alike.values()), with_drafts=False)
    plain = dict(zip(alike, (answer.output for answer in answers), strict=True))
    assert not engine.stats.speculation.steps
    for method in methods:
        speculation = speculation_of(method, directory, model, TWO)
        engine = await start(model, speculation)
        drafted, right = {one.cell: [0] * one.max_drafts for one in requests}, {one.cell: 0 for one in requests}
        for one, answer in zip(requests, await outputs(engine, requests), strict=True):
            assert answer.output == plain[one.sampling, *one.prompt], (method, one)
            told = answer.finished.speculation
            if told is not None:
                right[one.cell] += told.accepted
                for at, number in enumerate(told.drafted_at):
                    drafted[one.cell][at] += number
        for cell, numbers in drafted.items():
            assert min(numbers) > 0, (method, cell)
            assert 0 < right[cell] < sum(numbers), (method, cell)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", ["llama", "gemma2", "gpt-oss"])
async def test_outputs_are_those_without_drafts(variant, method, tiny_model, tmp_path, start):
    requests = asked(20, lengths=(1, 3, 8))
    await check(tiny_model(variant), tmp_path, [method], start, requests)


@pytest.mark.soak
async def test_outputs_of_all_families_are_those_without_drafts(any_model, tmp_path, start):
    requests = asked(200, lengths=(1, 2, 3, 4, 5, 6, 7, 8))
    await check(any_model, tmp_path, METHODS, start, requests)

"""Whatever is drafted, the tokens are those of no drafts at all, and on the CPU backend all that is told of them is, to
the last bit."""

import msgspec
import numpy as np
import pytest

from penstock.models.backends.base import load_backend
from penstock.models.errors import ModelError
from penstock.models.executor.process import WorkerProcess
from penstock.models.speculative.controller import SpeculationController
from penstock.models.speculative.cost_model import StepCost
from penstock.models.speculative.drafter import Drafter, Proposal
from penstock.models.speculative.ngram import NgramDrafter
from penstock.models.speculative.suffix import SuffixDrafter
from penstock.models.worker.speculation import make_controller, make_drafter
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.plan import AddedRow, Chunk, Decode, SamplingParams, StepPlan
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig, WorkerConfig

NUM_TOKENS = 24
VOCAB_SIZE = 160
"""Of the tiny models."""

FEW = (3, 30, 60, 90, 120, 150)
"""Tokens, so that random models repeat themselves."""
WAYS = (
    SamplingParams(temperature=0.0, logprobs=2, allowed_token_ids=FEW),
    SamplingParams(temperature=0.0, repetition_penalty=0.6, logprobs=1),
    SamplingParams(temperature=0.6, top_k=8, seed=1, logprobs=3, min_tokens=12, stop_token_ids=tuple(range(40))),
    SamplingParams(temperature=0.8, top_p=0.6, seed=2, logprobs=0, frequency_penalty=-0.7, presence_penalty=0.3),
    SamplingParams(temperature=0.5, seed=3, allowed_token_ids=FEW, bad_words=((3, 30), (3, 60, 90), (120,))),
)


def prompts():
    rng = np.random.default_rng(11)
    phrase = rng.integers(0, VOCAB_SIZE, 9).tolist()
    return [phrase * 4, rng.integers(0, VOCAB_SIZE, 30).tolist(), [7] * 20, phrase[:5] * 3 + phrase, [3]]


class Knowing(Drafter):
    """Knows the answers; or never does, where it is told wrong ones."""

    def __init__(self, answers):
        self._answers = answers

    def propose(self, wanted):
        proposals = []
        for row, max_drafts in wanted:
            at = len(row.history) - row.num_prompt_tokens
            drafts = self._answers[row.number][at : at + max_drafts]
            proposals.append(Proposal(drafts, [0.9] * len(drafts)))
        return proposals

    def drop_row(self, row):
        pass


class Speculating:
    """A backend, with what it makes of the prompts without drafts."""

    def __init__(self, config, player, asked):
        self._config = config
        self._backend = load_backend(config)
        self._player = player
        self._asked = asked
        self.path = config.model
        self.plain = self.run(None, 0)

    def run(self, controller, max_drafts, room=1 << 10, **options):
        asked = [self._asked(prompt, sampling, max_drafts) for prompt, sampling in zip(prompts(), WAYS, strict=True)]
        return self._player(self._backend, controller).run(asked, NUM_TOKENS, room, **options)

    def free(self, drafter, max_drafts):
        """Drafting that takes no time, by a clock that stands still; and drafts hardly any."""
        return SpeculationController(drafter, max_drafts, StepCost(2048), runs_ahead=False, clock=lambda: 0.0)

    def drafter(self, method, model, **config):
        """One that has weights."""
        speculation = SpeculationConfig(DraftMethod(method), 8, str(model))
        return make_drafter(msgspec.structs.replace(self._config, speculation=speculation, **config), self._backend)

    def chosen(self, method, max_drafts):
        """Drafting as the config asks, by the worker's own clock."""
        config = WorkerConfig("", speculation=SpeculationConfig(DraftMethod(method), max_drafts))
        return make_controller(config, self._backend)


@pytest.fixture(scope="module")
def made():
    """What is loaded once."""
    return {}


@pytest.fixture(params=["cpu-llama", "cpu-gemma2", "cpu-gpt-oss", "cpu-deepseek-v3", "reference-qwen3"])
def speculating(request, made, tiny_model, worker_config, player, asked):
    name, _, variant = request.param.partition("-")
    if request.param not in made:
        if name == "cpu":
            request.getfixturevalue("cpu_library")
        dtype = "bfloat16" if name == "cpu" else "float64"
        config = worker_config(tiny_model(variant).path, num_blocks=160, backend=name, dtype=dtype)
        made[request.param] = Speculating(config, player, asked)
    speculating = made[request.param]
    speculating.is_exact = name == "cpu"
    return speculating


def check(speculating, told):
    """Equal; returns how many drafts were right, and were not."""
    assert [one.token_ids for one in told] == [one.token_ids for one in speculating.plain]
    for one, plain in zip(told, speculating.plain, strict=True):
        if speculating.is_exact:
            assert one.logprobs == plain.logprobs
        else:
            assert [ids for _, ids, _ in one.logprobs] == [ids for _, ids, _ in plain.logprobs]
            assert [chosen for chosen, *_ in one.logprobs] == pytest.approx([chosen for chosen, *_ in plain.logprobs])
    return sum(one.num_accepted for one in told), sum(one.num_drafted - one.num_accepted for one in told)


@pytest.mark.parametrize("max_drafts", [1, 3, 8])
def test_nothing_changes_by_what_texts_repeat(speculating, max_drafts):
    config = SpeculationConfig(DraftMethod.NGRAM, max_drafts)
    for drafter in (NgramDrafter(config), SuffixDrafter(config)):
        told = speculating.run(speculating.free(drafter, max_drafts), max_drafts)
        num_right, num_wrong = check(speculating, told)
        assert num_right >= 5
        assert num_wrong > 0
    # What was output once, the tenant's late outputs tell.
    told = speculating.run(speculating.free(drafter, max_drafts), max_drafts)
    assert check(speculating, told)[0] > num_right + 10


@pytest.mark.parametrize("max_drafts", [1, 3, 8])
def test_nothing_changes_by_drafts_that_are_all_right_or_all_wrong(speculating, max_drafts):
    answers = [one.token_ids for one in speculating.plain]
    told = speculating.run(speculating.free(Knowing(answers), max_drafts), max_drafts)
    num_right, num_wrong = check(speculating, told)
    assert num_wrong == 0
    assert num_right >= 5 * (NUM_TOKENS - 1) * max_drafts // (max_drafts + 1) - 5 * max_drafts
    garbage = [[(token + 1) % VOCAB_SIZE for token in answer] for answer in answers]
    told = speculating.run(speculating.free(Knowing(garbage), max_drafts), max_drafts)
    num_right, num_wrong = check(speculating, told)
    assert num_right == 0
    assert num_wrong > 5 * max_drafts


@pytest.mark.parametrize("max_drafts", [1, 4])
def test_nothing_changes_by_a_draft_model(speculating, tiny_model, max_drafts):
    """One that always knows, one that never does, and one that takes long prompts in portions."""
    twin, other = speculating.path, tiny_model("olmo2").path
    drafter = speculating.drafter("draft_model", twin)
    for _ in range(2):  # the second time rows and blocks are those that others had
        told = speculating.run(speculating.free(drafter, max_drafts), max_drafts)
        num_right, num_wrong = check(speculating, told)
        assert num_right > 20 * num_wrong
    check(speculating, speculating.run(speculating.free(speculating.drafter("draft_model", other), 3), 3))
    slow = speculating.drafter("draft_model", twin, max_num_batched_tokens=16)
    assert check(speculating, speculating.run(speculating.free(slow, max_drafts), max_drafts))[0] > 0


def test_a_draft_model_of_another_vocabulary_is_refused(speculating, tmp_path, build_model):
    build_model(tmp_path, "Qwen3Config", {"vocab_size": 159})
    with pytest.raises(ModelError, match="has 159 tokens, and the large model 160: choose one with the same tokenizer"):
        speculating.drafter("draft_model", tmp_path)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_output_does_not_depend_on_the_clock(speculating, method):
    check(speculating, speculating.run(speculating.chosen(method, 4), 4, room=7))


@pytest.mark.parametrize("period", [1, 3, 8])
def test_nothing_changes_by_drafts_that_begin_and_end_with_repetition(speculating, period):
    config = SpeculationConfig(DraftMethod.AUTO, 8)
    controller = SpeculationController(
        NgramDrafter(config), 8, StepCost(2048), runs_ahead=False, clock=lambda: 0.0, on_repetition=True
    )
    told = speculating.run(controller, 8, repeats=lambda step: step % (2 * period) < period)
    assert check(speculating, told)[0] > 0
    told = speculating.run(controller, 8)
    assert check(speculating, told) == (0, 0)
    check(speculating, speculating.run(speculating.chosen("auto", 8), 8, repeats=lambda step: True))


async def test_a_worker_drafts_according_to_its_config(cpu_library, tiny_model, worker_config):
    speculation = SpeculationConfig(DraftMethod.NGRAM, 4)
    worker = WorkerProcess(worker_config(tiny_model("llama").path, backend="cpu", speculation=speculation))
    await worker.start()
    try:
        prompt, num_drafted = [1, 2, 3] * 10, 0
        sampling = SamplingParams(temperature=0.0, allowed_token_ids=(2,))
        worker.submit(
            StepPlan(0, [], [AddedRow(0, 0, prompt, 30, 0, list(range(7)), sampling, max_drafts=4)], [],
                     [Chunk(0, 0, 30)], [])
        )  # fmt: skip
        results = worker.results()
        await anext(results)
        for step in range(1, 15):
            worker.submit(StepPlan(step, [], [], [], [], [Decode(0, 5)], max_drafts=4))
            [row] = (await anext(results)).rows
            assert row.token_ids == [2] * len(row.token_ids)
            num_drafted += row.num_drafted
        assert num_drafted > 0
    finally:
        await worker.stop()
    speculation = SpeculationConfig(DraftMethod.EAGLE3, 4, model="/nowhere")
    refused = WorkerProcess(worker_config(tiny_model("llama").path, speculation=speculation))
    with pytest.raises(ExecutorError, match=r"--speculative-config: /nowhere: no such directory"):
        await refused.start()
    await refused.stop()

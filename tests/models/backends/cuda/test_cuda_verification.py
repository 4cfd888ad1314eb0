"""Drafts, masks and a draft model on the backend for GPUs: whatever is drafted, the tokens are those that the reference
backend chooses one after another."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from penstock.models.backends.base import Backend, load_backend
from penstock.models.batch.batch import build_batch
from penstock.models.batch.grammar_matcher import Words
from penstock.models.batch.rows import RowTable
from penstock.models.batch.sampled_positions import GrammarBitmasks, SampledPosition
from penstock.models.speculative.draft_model import DraftModelDrafter, load as load_draft_model
from penstock.models.speculative.drafter import Wanted
from penstock.models.worker.runner import _expect, _results
from penstock.scheduler.plan import AddedRow, Chunk, Decode, RowResult, SamplingParams, StepPlan
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig

if not find_spec("triton"):
    pytest.skip("needs Triton, which has wheels only for Linux", allow_module_level=True)

from penstock.kernels.aot import describe, float_variants, variants
from penstock.kernels.cuda.core.launch import launches

# Of the interpreter, which computes with numpy.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB_SIZE = 160
MAX_DRAFTS = 3
NUM_TOKENS = 6
SMALL = {
    "max_num_seqs": 4,
    "max_model_len": 64,
    "num_blocks": 8,
    "device": DEVICE,
    "backend": "cuda",
    "speculation": SpeculationConfig(DraftMethod.NGRAM, MAX_DRAFTS),
}
PROMPT = [3, 9, 1, 33, 9, 1, 3]
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
PENALISED = SamplingParams(temperature=1.2, seed=7, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3)
SEEDED = SamplingParams(temperature=0.8, seed=5, top_k=30, top_p=0.9, min_p=0.02, logprobs=3)


@pytest.fixture(autouse=True)
def nothing_compiles_late():
    before = launches.late
    yield
    assert launches.late == before, "a kernel was compiled after the warm-up"


class Steps:
    """A backend and its rows, with the drafts and masks of each step told by the test."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.table = RowTable(backend.facts.num_blocks, backend.facts.block_size, backend.facts.hidden_size)

    def run(
        self, plan: StepPlan, drafts: Mapping[int, Sequence[int]] | None = None, masked: tuple[int, ...] = ()
    ) -> list[RowResult]:
        """Rows in ``masked`` have a grammar."""
        self.backend.reset_blocks(self.table.apply(plan))
        batch = build_batch(self.table, plan, drafts or {})
        wanted = [index for index, line in enumerate(batch.sampled) if line.row.number in masked]
        if wanted:
            words: Future[Words] = Future()
            batch = replace(batch, masks=GrammarBitmasks(wanted, words))
            told = np.stack([allowed_words(batch.sampled[index]) for index in wanted])
            threading.Timer(0.01, words.set_result, [told]).start()
        finish = self.backend.start_step(batch)
        places = [
            _expect(row, end, number)
            for row, end, number in zip(batch.rows, batch.ends.tolist(), batch.num_sampled, strict=True)
        ]
        return _results(batch, places, finish().sampled)

    def end(self, rows: list[AddedRow]) -> None:
        self.table.apply(StepPlan(0, [row.row for row in rows], [], [], [], []))


def allowed_words(line: SampledPosition) -> Words:
    """A quarter of the tokens, others after each token, as a grammar has it; and one word more than there need be."""
    rng = np.random.default_rng([line.row.number, line.position, *line.tail(1)])
    bits = np.zeros(192, dtype=bool)
    bits[rng.permutation(VOCAB_SIZE)[:40]] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


Told = dict[int, tuple[list[int], list[float], list[int]]]
"""By row: its tokens, their log-probabilities, and the likeliest tokens."""


def take(told: Told, results: list[RowResult]) -> None:
    for result in results:
        tokens, chosen, tops = told.setdefault(result.row, ([], [], []))
        tokens += result.token_ids
        if result.logprobs is not None:
            chosen += result.logprobs.chosen
            tops += result.logprobs.top_token_ids


def added(number: int, sampling: SamplingParams, **more: Any) -> AddedRow:
    return AddedRow(number, 1, PROMPT, len(PROMPT), 0, [number, 4 + number], sampling, **more)


def begin(steps: Steps, rows: list[AddedRow], masked: tuple[int, ...]) -> Told:
    told: Told = {}
    plan = StepPlan(0, [], rows, [], [Chunk(row.row, 0, len(row.token_ids)) for row in rows], [])
    take(told, steps.run(plan, masked=masked))
    return told


def one_by_one(steps: Steps, rows: list[AddedRow], masked: tuple[int, ...] = ()) -> Told:
    """What rows choose without drafts."""
    told = begin(steps, rows, masked)
    for _ in range(NUM_TOKENS + MAX_DRAFTS):
        take(told, steps.run(StepPlan(0, [], [], [], [], [Decode(row.row, 1) for row in rows]), masked=masked))
    steps.end(rows)
    return told


RIGHT = (3, 0, 1, 2, 3, 3)
"""How many of a row's drafts are right, in one step after another."""


def check_drafted(steps: Steps, rows: list[AddedRow], expected: Told, masked: tuple[int, ...] = ()) -> None:
    """With drafts that are right, right in part and wrong, in steps in which others have fewer of them or none."""
    told = begin(steps, rows, masked)
    step = 0
    while any(len(tokens) < NUM_TOKENS for tokens, _, _ in told.values()):
        drafts: dict[int, list[int]] = {}
        num_right: dict[int, int] = {}
        unfinished = [row.row for row in rows if len(told[row.row][0]) < NUM_TOKENS]
        for number in unfinished:
            known = len(told[number][0])
            follows = expected[number][0][known : known + MAX_DRAFTS]
            right = num_right[number] = RIGHT[(step + number) % len(RIGHT)]
            wrong = [(token_id + 1) % VOCAB_SIZE for token_id in follows[right:]]
            # Where none is right, every second time there is none.
            drafts[number] = follows[:right] + wrong if right or step % 2 else []
        decodes = [Decode(number, 1 + len(drafts[number])) for number in unfinished]
        results = steps.run(StepPlan(0, [], [], [], [], decodes), drafts, masked)
        for result in results:
            assert len(result.token_ids) == 1 + num_right[result.row]
        take(told, results)
        step += 1
    steps.end(rows)
    for number, (tokens, chosen, tops) in told.items():
        wanted_tokens, wanted_chosen, wanted_tops = expected[number]
        assert tokens == wanted_tokens[: len(tokens)]
        assert tops == wanted_tops[: len(tops)]
        np.testing.assert_allclose(chosen, wanted_chosen[: len(chosen)], atol=1e-4)


@pytest.fixture(scope="module")
def path(tmp_path_factory, build_model):
    """A model of one layer."""
    return build_model(tmp_path_factory.mktemp("one"), "LlamaConfig", {"num_hidden_layers": 1}).path


@pytest.fixture(scope="module")
def pair(path, worker_config):
    """The backend, and the reference."""
    return [
        Steps(load_backend(worker_config(path, **{**SMALL, **more})))
        for more in ({}, {"backend": "reference", "device": "cpu"})
    ]


@pytest.fixture(scope="module")
def constrained(pair) -> SamplingParams:
    """Words are forbidden that would come, one of them in two tokens that may both be drafts; and so are stops."""
    sampling = SamplingParams(temperature=0.9, seed=11)
    for at in (1, 3):
        tokens = one_by_one(pair[1], [added(0, sampling)])[0][0]
        word = tuple(tokens[at - 1 : at + 1])
        sampling = SamplingParams(
            temperature=0.9, seed=11, bad_words=(*sampling.bad_words, word), stop_token_ids=(tokens[4],), min_tokens=6
        )
    return sampling


def test_drafts_change_nothing(pair, constrained):
    ours, reference = pair
    rows = [added(n, sampling) for n, sampling in enumerate((GREEDY, PENALISED, constrained, SEEDED))]
    expected = one_by_one(reference, rows)
    assert len({tuple(tokens) for tokens, _, _ in expected.values()}) == len(rows)
    check_drafted(ours, rows, expected)


def test_masks_are_awaited_while_layers_run(pair, monkeypatch):
    ours, reference = pair
    limited = SamplingParams(temperature=0.0, allowed_token_ids=(5, 6, 7))  # a grammar says it all
    rows = [added(0, GREEDY), added(1, PENALISED), added(2, limited)]
    expected = one_by_one(reference, rows, masked=(1, 2))
    assert expected != one_by_one(reference, rows)
    order: list[str] = []

    def note(of: Any, name: str) -> None:
        function = getattr(of, name)

        def noted(*args: Any, **more: Any) -> Any:
            order.append(name)
            return function(*args, **more)

        monkeypatch.setattr(of, name, noted)

    note(ours.backend._model, "forward")
    note(ours.backend._memory.rows, "write_masks")
    check_drafted(ours, rows, expected, masked=(1, 2))
    if DEVICE == "cpu":  # a graph calls nothing
        assert order == ["forward", "write_masks"] * (len(order) // 2)
    assert order.count("write_masks") > 2


@pytest.mark.skipif(DEVICE == "cuda", reason="a graph calls nothing that could be replaced")
def test_a_line_without_numbers_gets_the_lowest_token_that_its_grammar_allows(pair, monkeypatch):
    ours, reference = pair
    row, told = added(1, SEEDED), []
    for steps, model in ((ours, ours.backend._model), (reference, reference.backend)):
        logits = model.logits
        monkeypatch.setattr(model, "logits", lambda hidden, logits=logits: logits(hidden) * torch.nan)
        told.append(begin(steps, [row], masked=(1,))[1][0])
        steps.end([row])
    assert told[0] == told[1] != [0]


def test_what_is_warmed_is_what_is_compiled_ahead(tiny_model, worker_config):
    """With the forms for rows that have drafts."""
    config = SMALL | {"uses_predictions": False}  # their drafts are longer
    backend: Any = load_backend(worker_config(tiny_model("llama-tied-biases-head24").path, **config))
    shape = backend._memory.shape
    assert {*map(describe, launches.warmed)} == {*map(describe, chain(variants(shape), float_variants(shape)))}
    assert {1, 1 + MAX_DRAFTS} <= {shape.max_queries for shape in backend._memory.shape.attention()}


@pytest.fixture(scope="module")
def drafter(path, worker_config, pair) -> DraftModelDrafter:
    """In one process with the model, which it is itself: so all it proposes is right."""
    speculation = SpeculationConfig(DraftMethod.DRAFT_MODEL, MAX_DRAFTS, model=str(path))
    return load_draft_model(worker_config(path, **{**SMALL, "speculation": speculation}), pair[0].backend)


def test_a_draft_model_goes_on_and_back_as_on_the_reference_backend(pair, drafter, constrained):
    """It is told that only some of its drafts were right."""
    table, reference = Steps(pair[0].backend).table, DraftModelDrafter(pair[1].backend)
    samplings = (GREEDY, PENALISED, constrained)
    drafter.attach(table)
    reference.attach(table)
    block_ids = table.apply(StepPlan(0, [], [added(n, sampling) for n, sampling in enumerate(samplings)], [], [], []))
    for each in (drafter, reference):
        each.reset_blocks(block_ids)
    rows = [table[number] for number in range(len(samplings))]
    for step in range(4):
        wanted = [Wanted(row, MAX_DRAFTS) for row in rows if step + row.number != 2]
        proposed = drafter.propose(wanted)
        assert proposed == reference.propose(wanted)
        assert all(len(proposal.token_ids) == MAX_DRAFTS for proposal in proposed)
        for (row, _), proposal in zip(wanted, proposed, strict=True):
            right = (step + row.number) % (MAX_DRAFTS + 1)
            for token_id in (*proposal.token_ids[:right], (row.number * 31 + step) % VOCAB_SIZE):
                row.append(token_id)


def test_what_a_draft_model_proposes_is_verified(pair, drafter):
    ours, reference = pair
    row = added(3, PENALISED)
    drafter.attach(ours.table)
    drafter.reset_blocks(row.block_ids)
    told = begin(ours, [row], ())
    for _ in range(2):
        [(drafts, *_)] = drafter.propose([Wanted(ours.table[3], MAX_DRAFTS)])
        results = ours.run(StepPlan(0, [], [], [], [], [Decode(3, 1 + MAX_DRAFTS)]), {3: drafts})
        assert results[0].token_ids[:-1] == drafts
        take(told, results)
    ours.end([row])
    assert told[3][0] == one_by_one(reference, [row])[3][0][: 1 + 2 * (1 + MAX_DRAFTS)]

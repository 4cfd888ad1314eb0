"""Rows whose reasoning has a limit, on the backends: once it is reached, the next token closes the reasoning."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.models.backends.base import Backend, load_backend
from penstock.models.speculative.controller import SpeculationController
from penstock.models.speculative.cost_model import StepCost
from penstock.models.speculative.drafter import Drafter, Proposal, Wanted
from penstock.models.structured_output.compiler import to_grammar
from penstock.models.structured_output.manager import grammars_of
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, Decode, SamplingParams, StepPlan
from penstock.scheduler.reasoning_limit import MarkerSearch, ReasoningLimit
from penstock.scheduler.worker_config import WorkerConfig

DEMO = str(Path(__file__).parents[3] / "models" / "demo")
PROMPT = [531, 924, 296]
CLOSES, AFTER = 1000, 12
LIMIT = ReasoningLimit(4, True, MarkerSearch(1, ({CLOSES: 1},)), ((CLOSES, AFTER),))
GREEDY = SamplingParams(temperature=0.0, logit_bias=((CLOSES, -100.0),))
LIMITED = SamplingParams(temperature=0.0, logit_bias=((CLOSES, -100.0),), reasoning=LIMIT)
NUM_TOKENS = 10


class Guesses(Drafter):
    """Proposes what the model would write without a limit, which is wrong from the limit on."""

    def __init__(self, output: Sequence[int]) -> None:
        self.output = output

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        done = [len(row.history) - len(PROMPT) for row, _ in wanted]
        parts = [list(self.output[at : at + most]) for at, (_, most) in zip(done, wanted, strict=True)]
        return [Proposal(part, [0.9] * len(part)) for part in parts]

    def drop_row(self, row: object) -> None:
        pass


def run(
    runner: Runner, sampling: SamplingParams, output: Sequence[int] = (), max_drafts: int = 0, grammar: str = ""
) -> list[int]:
    """Returns the tokens of a row, which may restart after some of its output."""
    history = [*PROMPT, *output]
    row = AddedRow(0, 0, history, len(PROMPT), 0, [0, 1], sampling, max_drafts=max_drafts, grammar=grammar)
    tokens = list(output)
    result = runner.run(StepPlan(0, [], [row], [], [Chunk(0, 0, len(history))], []))
    tokens += result.rows[0].token_ids
    while len(tokens) < NUM_TOKENS:
        most = 1 + max_drafts
        result = runner.run(StepPlan(0, [], [], [], [], [Decode(0, most)], max_drafts=max_drafts))
        tokens += result.rows[0].token_ids
    runner.run(StepPlan(0, [0], [], [], [], []))
    return tokens[:NUM_TOKENS]


def config_of(backend: str) -> WorkerConfig:
    return WorkerConfig(
        DEMO, dtype="float32", backend=backend, num_blocks=4, tokenizer=DEMO, tokenizer_vocab_size=4096,
        eos_token_ids=(4093, 4095),
    )  # fmt: skip


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return load_backend(config_of(request.param))


def test_the_marker_follows_and_the_output_goes_on(backend: Backend) -> None:
    runner = Runner(backend)
    free, limited = run(runner, GREEDY), run(runner, LIMITED)
    assert CLOSES not in free
    assert limited[:6] == [*free[:4], CLOSES, AFTER]
    assert limited.count(CLOSES) == 1
    # The row may restart at any place, after a preemption or on a new worker.
    assert all(run(runner, LIMITED, limited[:num]) == limited for num in range(1, 8))


def test_drafts_change_nothing(backend: Backend) -> None:
    free, limited = run(Runner(backend), GREEDY), run(Runner(backend), LIMITED)
    for guess in (free, limited):
        controller = SpeculationController(Guesses(guess), 5, StepCost(2048), runs_ahead=False)
        assert run(Runner(backend, controller), LIMITED, max_drafts=5) == limited


def test_other_restrictions_hold_beside_it(backend: Backend) -> None:
    allowed = SamplingParams(temperature=0.0, allowed_token_ids=(500, 501), reasoning=LIMIT)
    limited = run(Runner(backend), allowed)
    assert limited[4:6] == [CLOSES, AFTER]
    assert {*limited[:4], *limited[6:]} <= {500, 501}
    grammar = to_grammar("lark", f"start: <[^{CLOSES}]>{{1,8}} <[{CLOSES}]> <[{AFTER}]> /[ab]+/")
    limited = run(Runner(backend, None, grammars_of(config_of("reference"))), LIMITED, grammar=grammar)
    assert limited[4] == CLOSES
    assert limited[:4] == run(Runner(backend), LIMITED)[:4]

"""Runners that draft with a head, whatever it costs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.models.backends.base import load_backend
from penstock.models.batch.rows import RowTable
from penstock.models.speculative.controller import SpeculationController
from penstock.models.speculative.cost_model import StepCost
from penstock.models.speculative.draft_rows import Drafted
from penstock.models.speculative.drafter import Drafter, Wanted
from penstock.models.speculative.heads import drafter as heads
from penstock.models.worker.runner import Runner
from penstock.models.worker.speculation import check_speculation
from penstock.scheduler.plan import AddedRow, Chunk, Decode, SamplingParams, StepPlan
from penstock.scheduler.worker_config import WorkerConfig


class Watched(SpeculationController):
    """All that is proposed is drafted, whatever it costs; and what it was after which histories."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter, 8, StepCost(2048), runs_ahead=False, clock=lambda: 0.0)
        self._propose = drafter.propose
        self.proposed: list[tuple[list[int], int, list[int], SamplingParams]] = []
        """The history, the number of drafts, the drafts, and how they were chosen."""

    def propose(
        self,
        plan: StepPlan,
        table: RowTable,
        wait_for_tokens: Callable[[], object],
        forced: Mapping[int, Sequence[int]],
    ) -> Drafted:
        wanted = [Wanted(table[decode.row], decode.max_tokens - 1) for decode in plan.decodes if decode.max_tokens > 1]
        assert all(self._drafter.is_ready(row) for row, _ in wanted)
        wait_for_tokens()
        drafts: dict[int, list[int]] = {}
        for (row, most), (token_ids, confidences, _) in zip(wanted, self._propose(wanted), strict=True):
            assert len(token_ids) == len(confidences) == most
            self.proposed.append((list(row.history), most, token_ids, row.sampling))
            drafts[row.number] = token_ids
        return Drafted(drafts)


def start(config: WorkerConfig, with_head: bool = True) -> tuple[Runner, Any]:
    """Returns a runner, and its ``Watched`` or None."""
    config = check_speculation(config)
    backend = load_backend(config)
    controller = Watched(heads.load(config, backend)) if with_head else None
    return Runner(backend, controller), controller


def added(
    number: int, prompt: list[int], first_block: int, sampling: SamplingParams, num_computed: int = 0
) -> AddedRow:
    """Returns a row with six blocks, and a slot if it has a recurrent state."""
    blocks = list(range(first_block, first_block + 6))
    return AddedRow(number, 0, prompt, len(prompt), num_computed, blocks, sampling, max_drafts=8, state_slot=number)


def decode(runner: Runner, rows: dict[int, list[int]], num_tokens: int, num_drafts: int) -> int:
    """Continues rows, given with what they have so far, until they have ``num_tokens``."""
    steps = 0
    while short := [number for number, tokens in rows.items() if len(tokens) < num_tokens]:
        plan = StepPlan(steps, [], [], [], [], [Decode(n, num_drafts + 1) for n in short], max_drafts=8 * num_drafts)
        for result in runner.run(plan).rows:
            rows[result.row] += result.token_ids
        steps += 1
    return steps


SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams(seed=3), SamplingParams(seed=4, frequency_penalty=0.3))


def answers(
    runner: Runner, prompts: Sequence[list[int]], num_drafts: int, num_tokens: int = 30
) -> dict[int, list[int]]:
    """Prompts of which the last one comes in three chunks while others decode."""
    blocks = range(0, 60, 6)
    long = len(prompts) - 1
    rows = [added(n, prompt, blocks[n], SAMPLINGS[n]) for n, prompt in enumerate(prompts)]
    chunks = [Chunk(n, 0, len(prompt)) for n, prompt in enumerate(prompts[:long])]
    tokens = {row.row: row.token_ids for row in runner.run(StepPlan(0, [], rows, [], chunks, [])).rows}
    for begin, end in ((0, 7), (7, 33), (33, len(prompts[long]))):
        decodes = [Decode(n, num_drafts + 1) for n in range(long)]
        for result in runner.run(StepPlan(0, [], [], [], [Chunk(long, begin, end)], decodes, max_drafts=9)).rows:
            tokens[result.row] = tokens.get(result.row, []) + result.token_ids
    decode(runner, tokens, num_tokens, num_drafts)
    return {number: some[:num_tokens] for number, some in tokens.items()}


def few_rows(prompt: list[int]) -> list[AddedRow]:
    """Of 5 and 14 tokens."""
    return [
        AddedRow(0, 0, prompt[:5], 5, 0, [0, 1], SAMPLINGS[0], max_drafts=8, state_slot=0),
        AddedRow(1, 0, prompt[:14], 14, 0, [2, 3], SAMPLINGS[1], max_drafts=8, state_slot=1),
    ]


def few_answers(runner: Runner, prompt: list[int], num_drafts: int) -> dict[int, list[int]]:
    """Of ``few_rows``: one comes in two chunks while the other decodes."""
    first = runner.run(StepPlan(0, [], few_rows(prompt), [], [Chunk(0, 0, 5), Chunk(1, 0, 9)], []))
    tokens = {0: first.rows[0].token_ids if first.rows[0].row == 0 else first.rows[1].token_ids}
    plan = StepPlan(0, [], [], [], [Chunk(1, 9, 14)], [Decode(0, num_drafts + 1)], max_drafts=num_drafts)
    for result in runner.run(plan).rows:
        tokens[result.row] = tokens.get(result.row, []) + result.token_ids
    decode(runner, tokens, 4, num_drafts)
    return {number: some[:4] for number, some in tokens.items()}

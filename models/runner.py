"""One step of the worker: a plan in, a result out. Owns the rows; knows no process, no socket, no tensors, and no clock
but its own."""

import time

from penstock.models.backend import Backend
from penstock.models.batch import Batch, Sampled, build_batch
from penstock.models.rows import RowTable
from penstock.scheduler.plan import (
    AddedRow,
    Chunk,
    Decode,
    PromptLogprobsPart,
    RowResult,
    SamplingParams,
    StepPlan,
    StepResult,
)


class Runner:
    """Runs plans on a backend, strictly in order."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._rows = RowTable(backend.facts.num_blocks, backend.facts.block_size, backend.facts.hidden_size)

    def warm(self) -> None:
        """Runs a short row, so that no request pays for what a library sets up at its first use. Leaves nothing behind:
        its block is renewed before anyone has it."""
        facts = self._backend.facts
        # No position is computed that no request could have: tables end with the context.
        end = min(facts.block_size, facts.max_model_len)
        length = max(1, end - 1)
        sampling = SamplingParams(top_k=2, top_p=0.5, min_p=0.1, logprobs=1)
        self.run(
            StepPlan(0, [], [AddedRow(0, 0, [0] * length, length, 0, [0], sampling)], [], [Chunk(0, 0, length)], [])
        )
        if length < end:
            self.run(StepPlan(0, [], [], [], [], [Decode(0, 1)]))
        self.run(StepPlan(0, [0], [], [], [], []))

    def run(self, plan: StepPlan) -> StepResult:
        """Applies a plan and computes it. ``waited_us`` of the result is left at 0 for the caller, who knows."""
        began = time.monotonic_ns()
        self._backend.renew(self._rows.apply(plan))
        rows: list[RowResult] = []
        parts: list[PromptLogprobsPart] = []
        if not plan.is_empty:
            batch = build_batch(self._rows, plan)
            sampled, parts = self._backend.run(batch)
            rows = _commit(batch, sampled)
        return StepResult(plan.step, rows, parts, 0, (time.monotonic_ns() - began) // 1000)


def _commit(batch: Batch, sampled: list[Sampled]) -> list[RowResult]:
    """Moves the rows on by what was computed and chosen."""
    results = []
    tokens = iter(sampled)
    for row, end, samples in zip(batch.rows, batch.ends.tolist(), batch.samples, strict=True):
        row.num_computed = end
        if not samples:
            vector = row.pooled.vector() if row.pooled is not None and end == len(row.history) else None
            results.append(RowResult(row.number, row.epoch, end, [], vector=vector))
            continue
        token = next(tokens)
        row.append(token.token_id)
        results.append(RowResult(row.number, row.epoch, end, [token.token_id], token.logprobs))
    return results

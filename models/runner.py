"""One step of the worker: a plan in, a result out. Owns the rows; knows no process, no socket, no tensors, and no clock
but its own."""

import time
from collections.abc import Callable

from penstock.models.backend import Backend
from penstock.models.batch import Sampled, build_batch
from penstock.models.rows import Row, RowTable
from penstock.scheduler.plan import (
    AddedRow,
    Chunk,
    Decode,
    RowResult,
    SamplingParams,
    StepPlan,
    StepResult,
)


class Runner:
    """Runs plans on a backend, strictly in order."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._done_at = 0
        self.runs_ahead = backend.runs_ahead
        """Whether the next plan may begin while one is computed."""
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
        return self.begin(plan)()

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Applies a plan and has it computed; what is returned waits for the result. Plans begin in their order, and
        are waited for in their order, by another thread perhaps."""
        began = time.monotonic_ns()
        if plan.copies_out:
            self._backend.copy_out(plan.copies_out)
        self._backend.renew(self._rows.apply(plan))
        if plan.copies_in:
            self._backend.copy_in(plan.copies_in)
        if plan.is_empty:
            return lambda: StepResult(plan.step, [], [], 0, (time.monotonic_ns() - began) // 1000)
        batch = build_batch(self._rows, plan)
        finish = self._backend.begin(batch)
        ends = batch.ends.tolist()
        places: list[int | None] = []
        for row, end, samples in zip(batch.rows, ends, batch.samples, strict=True):
            row.num_computed = end
            places.append(row.expect() if samples else None)

        def result() -> StepResult:
            sampled, parts = finish()
            rows = _results(batch.rows, ends, places, sampled)
            done = time.monotonic_ns()
            # The device computes one step after the other.
            computed_us = (done - max(began, self._done_at)) // 1000
            self._done_at = done
            return StepResult(plan.step, rows, parts, 0, computed_us)

        return result


def _results(rows: list[Row], ends: list[int], places: list[int | None], sampled: list[Sampled]) -> list[RowResult]:
    """Tells the rows which tokens were chosen, and the scheduler what became of the rows."""
    results = []
    tokens = iter(sampled)
    for row, end, place in zip(rows, ends, places, strict=True):
        if place is None:
            vector = row.pooled.vector() if row.pooled is not None and end == len(row.history) else None
            results.append(RowResult(row.number, row.epoch, end, [], vector=vector))
            continue
        token = next(tokens)
        row.learn(place, token.token_id)
        results.append(RowResult(row.number, row.epoch, end, [token.token_id], token.logprobs))
    return results

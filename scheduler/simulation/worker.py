"""A worker that computes nothing and takes virtual time."""

import random
from typing import Protocol

from penstock.scheduler.plan import RowResult, StepPlan, StepResult
from penstock.scheduler.simulation.costs import SimulatedCosts
from penstock.scheduler.timing.step_time import StepWork


class TimedWorker(Protocol):
    """Runs plans at once, in order."""

    def run(self, plan: StepPlan) -> StepResult:
        """Returns the result of a plan. Its ``computed_us`` is the time of the step in all stages together."""


class _SimulatedRow:
    __slots__ = ("epoch", "length", "token")

    def __init__(self, epoch: int, token: int, length: int) -> None:
        self.epoch = epoch
        self.token = token
        self.length = length


class SimulatedWorker:
    """Repeats the last token of each prompt. Checks nothing, so it is fast."""

    def __init__(self, costs: SimulatedCosts, seed: int | str = 0) -> None:
        self._costs = costs
        self._rng = random.Random(f"{seed}/steps")
        start = self._rng.random()
        self._busy_s = {has_chunks: start * costs.noise.seconds(has_chunks) for has_chunks in (False, True)}
        """How long the worker has computed steps without and with prompts, from a random place of the log on."""
        self._rows: dict[int, _SimulatedRow] = {}
        self.most_tokens = 0
        """Tokens of the step that had the most."""
        self.most_rows = 0
        """Decoding rows of the step that had the most."""

    def run(self, plan: StepPlan) -> StepResult:
        rows = self._rows
        for number in plan.dropped:
            del rows[number]
        for added in plan.added:
            rows[added.row] = _SimulatedRow(added.epoch, added.token_ids[-1], len(added.token_ids))
        results = []
        for chunk in plan.chunks:
            row = rows[chunk.row]
            token_ids = []
            if chunk.end == row.length:
                row.length += 1
                token_ids = [row.token]
            results.append(RowResult(chunk.row, row.epoch, chunk.end, token_ids))
        decode_kv = num_drafted = 0
        for decode in plan.decodes:
            row = rows[decode.row]
            drafted = accepted = 0
            if decode.max_tokens > 1:
                drafted, accepted = self._draft(min(decode.max_tokens - 1, plan.max_drafts - num_drafted))
                num_drafted += drafted
            decode_kv += row.length
            row.length += 1 + accepted
            token_ids = [row.token] if not accepted else [row.token] * (1 + accepted)
            results.append(RowResult(decode.row, row.epoch, row.length - 1, token_ids, num_drafted=drafted))
        return StepResult(plan.step, results, [], 0, self._microseconds(plan, decode_kv, num_drafted))

    def _draft(self, most: int) -> tuple[int, int]:
        """Returns how many tokens are drafted, and how many of them accepted."""
        rates = self._costs.drafts
        num_drafted = min(most, int(rates.per_row + self._rng.random()))
        num_accepted = 0
        while num_accepted < num_drafted and self._rng.random() < rates.accepted:
            num_accepted += 1
        return num_drafted, num_accepted

    def _microseconds(self, plan: StepPlan, decode_kv: int, num_drafted: int) -> int:
        work = StepWork.of(plan, decode_kv)
        self.most_tokens = max(self.most_tokens, int(work.prefill_tokens + work.decodes))
        self.most_rows = max(self.most_rows, int(work.decodes))
        has_chunks = bool(plan.chunks)
        factor = self._costs.noise.factor(self._busy_s[has_chunks], has_chunks)
        seconds = self._costs.step.seconds(work, num_drafted) * factor
        self._busy_s[has_chunks] += seconds
        return max(1, round((seconds + work.copied_blocks * self._costs.copy_s) * 1e6))

"""Simulations whose worker validates every plan, for tests of policies, deadlines and predictions."""

from collections.abc import Callable, Sequence

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import SamplingParams, StepPlan, StepResult
from penstock.scheduler.simulation.simulation import Outcome, Simulation
from penstock.scheduler.testing.fake_worker import FakeWorker, Slots
from penstock.scheduler.timing.step_time import StepWork
from penstock.scheduler.worker_config import WorkerFacts

StepSeconds = Callable[[StepWork], float]
"""Returns the time of a step."""


def cpu_step_s(work: StepWork) -> float:
    """Returns about the time of the demo model on one core."""
    return 1e-3 * (
        2.6
        + 0.033 * work.prefill_tokens
        + 6.4e-5 * work.prefill_kv
        + 0.056 * work.decodes
        + 3.6e-4 * work.decode_kv
        + 1.1 * work.chunks
        + 8.6e-4 * work.chunk_kv
    )


def checked_simulation(
    facts: WorkerFacts, config: SchedulerConfig, step_s: StepSeconds = cpu_step_s, slots: Slots | None = None
) -> Simulation:
    """Returns a simulation of one replica, without costs outside of the worker. Plans are made as early as
    possible."""
    worker = _CheckedWorker(facts, step_s, slots or Slots())
    simulation = Simulation(facts, config, lambda: worker, delays_plans=False)
    worker.outcomes = simulation.outcomes
    return simulation


class _CheckedWorker(FakeWorker):
    """A worker whose results contain simulated times. The last token of a prompt is the number of its request, and so
    is all output."""

    def __init__(self, facts: WorkerFacts, step_s: StepSeconds, slots: Slots) -> None:
        super().__init__(facts, _same_again, slots)
        self.outcomes: list[Outcome] = []
        self._step_s = step_s

    def run(self, plan: StepPlan) -> StepResult:
        """Returns the result, with the time of the step."""
        result = super().run(plan)
        for chunk in plan.chunks:
            self._count(chunk.row, chunk.end - chunk.start)
        for decode in plan.decodes:
            self._count(decode.row, 1)
        decode_kv = sum(self._rows[decode.row].num_computed for decode in plan.decodes)
        result.computed_us = max(1, round(self._step_s(StepWork.of(plan, decode_kv)) * 1e6))
        return result

    def _count(self, row: int, num_tokens: int) -> None:
        number = self._rows[row].history[self._rows[row].num_prompt_tokens - 1]
        self.outcomes[number].num_computed += num_tokens


def _same_again(history: Sequence[int], sampling: SamplingParams) -> int:
    return history[-1]

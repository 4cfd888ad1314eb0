"""Step logs whose costs are known, and a service to simulate."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import StepPlan, StepResult
from penstock.scheduler.simulation.costs import StepCosts
from penstock.scheduler.simulation.step_log import (
    FORMAT,
    LoggedLimits,
    LoggedStep,
    StepLogHeader,
    StepTimes,
    logged_step,
)
from penstock.scheduler.simulation.worker import SimulatedWorker
from penstock.scheduler.timing.step_time import StepWork
from penstock.scheduler.worker_config import WorkerFacts

FACTS = WorkerFacts(
    num_blocks=4000,
    block_size=16,
    vocab_size=8000,
    max_model_len=4096,
    max_num_seqs=64,
    max_num_batched_tokens=256,
    architecture="fake",
    backend="fake",
    device="cpu",
    dtype="float32",
    kv_cache_dtype="float32",
    weight_bytes=0,
    kv_bytes=0,
)
LIMITS = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=256)
COSTS = StepCosts(
    constant=2.6e-3,
    prefill_tokens=3.3e-5,
    prefill_kv=6.4e-8,
    decodes=5.6e-5,
    decode_kv=3.6e-7,
    chunks=1.1e-3,
    chunk_kv=8.6e-7,
)
"""About those of the demo model on one core."""


class LoggingWorker:
    """Notes the line of each step. Everything outside of the step takes a millisecond."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker
        self._now = 0.0
        self.steps: list[LoggedStep] = []

    def run(self, plan: StepPlan) -> StepResult:
        result = self._worker.run(plan)
        answered = self._now + result.computed_us * 1e-6 + 1e-3
        self.steps.append(logged_step(plan, result, StepTimes(self._now, answered, answered + 1e-4)))
        self._now = answered
        return result


def random_steps(
    number: int = 400, seed: int = 0, noise: float = 0.0, costs: StepCosts = COSTS, most_rows: int = 32
) -> list[LoggedStep]:
    """Steps of all kinds, which take what they cost."""
    rng = random.Random(seed)
    return [_random_step(rng, step, noise, costs, most_rows) for step in range(number)]


def _random_step(rng: random.Random, step: int, noise: float, costs: StepCosts, most_rows: int) -> LoggedStep:
    decodes = rng.randint(0, most_rows)
    chunks = rng.choice((0, 0, 1, 2)) if decodes else 1
    tokens = sum(rng.randint(16, 224) for _ in range(chunks))
    context = rng.randint(0, 500)
    work = StepWork(
        tokens, tokens * (2 * context + tokens) // 2, decodes, decodes * rng.randint(50, 600), chunks,
        chunks * (context + tokens),
    )  # fmt: skip
    seconds = costs.seconds(work) * rng.lognormvariate(0, noise)
    fields = {name: int(value) for name, value in work._asdict().items()}
    when = float(step)
    return LoggedStep(
        step=step, **fields, seconds=seconds, waited_s=0.5, submitted_s=when, answered_s=when + seconds + 0.002,
        handled_s=1e-4,
    )  # fmt: skip


def header(**facts: Any) -> StepLogHeader:
    changed = msgspec.structs.replace(FACTS, **facts)
    return StepLogHeader(step_log=FORMAT, penstock="0.1.0", limits=LoggedLimits.of(LIMITS), facts=changed)


def write_log(path: Path, steps: Iterable[LoggedStep], first: StepLogHeader | None = None) -> Path:
    lines = [first or header(), *steps]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path

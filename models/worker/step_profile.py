"""Measures where the time of steps goes, by the CPU library's stages. As a program, reads a ``ProfileJob`` on standard
input and writes a ``ProfileMessage`` a line on standard output; ``penstock profile`` runs it."""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from penstock.kernels.cpu.bindings import StorageFormat, find_kernels
from penstock.kernels.cpu.program import Library
from penstock.models.backends.base import load_backend
from penstock.models.backends.cpu.backend import CpuBackend
from penstock.models.backends.cpu.machine_limits import measure_limits
from penstock.models.backends.cpu.stage_limits import ComputedSpan, MachineLimits, StageLimit, StageLimits
from penstock.models.errors import ModelError
from penstock.models.executor.step_profile import (
    ProfiledLoad,
    ProfileJob,
    ProfileMessage,
    StageTime,
    StepProfile,
    StepTime,
)
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import Chunk, Decode, SamplingParams, StepPlan
from penstock.scheduler.worker_config import WorkerConfig

PYTHON = "Python"
"""What a step takes beyond the library's stages: the worker's own work, and what lies between them."""
FIRST_ID, NUM_IDS = 3, 1000
"""Prompts consist of these token ids, which every vocabulary has or nearly has."""


class _Timed(NamedTuple):
    """A step."""

    seconds: float
    stages: dict[str, float]
    limits: dict[str, StageLimit]
    tokens: int


def profile_model(
    config: WorkerConfig,
    load: ProfiledLoad,
    on_progress: Callable[[str], object] = lambda text: None,
    machine: MachineLimits | None = None,
) -> StepProfile:
    """Loads the model, measures the machine unless that has been done, and runs the load. The configuration's backend
    must be cpu. Raises ModelError, also if the CPU library cannot run the model."""
    on_progress("loading the model")
    backend = load_backend(config)
    assert isinstance(backend, CpuBackend), "the configuration names it"
    if machine is None:
        on_progress("measuring memory and arithmetic")
        kernels = find_kernels()
        assert kernels is not None, "the backend uses them"
        library = Library(config.num_threads, cpus=config.thread_cpus, nodes=config.thread_nodes)
        machine = measure_limits(library, kernels, _formats(backend))
    prefills, decodes = _run(backend, load, StageLimits(backend.model.model, machine), on_progress)
    facts = backend.facts
    return StepProfile(
        facts.instruction_set,
        facts.num_threads,
        facts.quantization if facts.quantization != "none" else facts.dtype,
        facts.kv_cache_dtype,
        machine.bytes_per_s,
        machine.operations_per_s,
        [
            _mean("decode", [[step] for step in decodes]),
            _mean("prefill", prefills),
        ],
    )


def _formats(backend: CpuBackend) -> set[StorageFormat]:
    model = backend.model.model
    weights = "int8" if backend.facts.quantization != "none" else backend.facts.dtype
    return {StorageFormat(model.head.parts[0].format), StorageFormat.INT8 if weights == "int8" else StorageFormat.BF16}


def _run(
    backend: CpuBackend, load: ProfiledLoad, limits: StageLimits, on_progress: Callable[[str], object]
) -> tuple[list[list[_Timed]], list[_Timed]]:
    """Returns the steps of each round's prompts, and all steps of decoding. A first round, of prompts only, does not
    count: the system clears memory that is written for the first time."""
    runner = Runner(backend)
    runner.warm()
    prefills, decodes = [], []
    rows, blocks, prompt = range(load.rows), load.blocks_per_row, load.prompt_tokens
    ids = max(1, min(NUM_IDS, backend.model.model.num_logits - FIRST_ID))
    for number in range(load.rounds + 1):
        on_progress(f"round {number} of {load.rounds}" if number else "first prompts, not counted")
        added = [
            runner.make_row(
                row,
                [FIRST_ID + (number + row * 7 + i) % ids for i in range(prompt)],
                list(range(row * blocks, (row + 1) * blocks)),
                SamplingParams(temperature=0.0),
            )
            for row in rows
        ]
        steps = []
        for chunks in _chunks(load, load.step_tokens or backend.facts.max_num_batched_tokens):
            new = [added[chunk.row] for chunk in chunks if chunk.start == 0]
            least = limits.of_step(
                [ComputedSpan(chunk.start, chunk.end) for chunk in chunks], sum(chunk.end == prompt for chunk in chunks)
            )
            steps.append(_timed(backend, runner, StepPlan(0, [], new, [], chunks, []), least))
        if number > 0:
            prefills.append(steps)
            plan = StepPlan(0, [], [], [], [], [Decode(row, 1) for row in rows])
            for position in range(prompt, prompt + load.output_tokens - 1):
                least = limits.of_step([ComputedSpan(position, position + 1)] * load.rows, load.rows)
                decodes.append(_timed(backend, runner, plan, least))
        runner.run(StepPlan(0, list(rows), [], [], [], []))
    return prefills, decodes


def _chunks(load: ProfiledLoad, step_tokens: int) -> Iterator[list[Chunk]]:
    """Yields the chunks of each step: prompts one after another, in steps that are full."""
    chunks: list[Chunk] = []
    room = step_tokens
    for row in range(load.rows):
        start = 0
        while start < load.prompt_tokens:
            end = min(load.prompt_tokens, start + room)
            chunks.append(Chunk(row, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield chunks
                chunks, room = [], step_tokens
    if chunks:
        yield chunks


def _timed(backend: CpuBackend, runner: Runner, plan: StepPlan, limits: dict[str, StageLimit]) -> _Timed:
    before = backend.seconds()
    seconds = runner.run(plan).computed_us / 1e6
    stages = {name: value - before[name] for name, value in backend.seconds().items()}
    stages[PYTHON] = max(0.0, seconds - sum(stages.values()))
    tokens = sum(chunk.end - chunk.start for chunk in plan.chunks) + len(plan.decodes)
    return _Timed(sum(stages.values()), stages, limits, tokens)


def _mean(kind: str, groups: Sequence[Sequence[_Timed]]) -> StepTime:
    """Returns the mean of the middle half of the groups by time: unlike medians of single stages, means add up. The
    times and limits of a group's steps are added."""
    ordered = sorted(groups, key=lambda group: sum(step.seconds for step in group))
    middle = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    seconds: dict[str, float] = defaultdict(float)
    limits: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for step in (step for group in middle for step in group):
        for name, value in step.stages.items():
            seconds[name] += value / len(middle)
        for name, limit in step.limits.items():
            for index, value in enumerate((max(limit), limit.memory, limit.arithmetic)):
                limits[name][index] += value / len(middle)
    total = sum(seconds.values())
    stages = []
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        if value > 0:
            least, memory, arithmetic = limits.get(name, (0.0, 0.0, 0.0))
            by = None if least == 0 else "memory" if memory >= arithmetic else "arithmetic"
            stages.append(StageTime(name, value, value / total, least or None, by))
    return StepTime(kind, sum(step.tokens for step in middle[0]), total, stages)


def main() -> None:
    """Runs the job on standard input."""
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print must not get between the messages
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ProfileJob)

    def send(message: ProfileMessage) -> None:
        output.write(msgspec.json.encode(message) + b"\n")

    try:
        profile = profile_model(job.worker, job.load, lambda text: send(ProfileMessage(progress=text)))
        send(ProfileMessage(profile=profile))
    except ModelError as error:
        send(ProfileMessage(problem=str(error)))


if __name__ == "__main__":
    main()

"""What LoRA adapters cost on a CPU: a step with four adapters and the base in one batch, and loading one under load.

The model has the shape of Qwen3-0.6B, with made-up weights in bf16 (or --quantization). Each pair of steps, one of the
base only and one that is mixed, is timed one after the other, so that a busy machine slows both down; the figure is the
median of their ratios. The second part streams rows of the base from a worker process, with and without adapters that
are loaded meanwhile, and compares the 99th percentiles of the time between tokens.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from cpu_bench.floors import write_config
from safetensors.numpy import save_file

from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.base import Backend, load_backend
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.lora.adapter import MODULES, adapted_linears, read_adapter
from penstock.models.executor.process import WorkerProcess
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AdapterLoad, AddedRow, Chunk, Decode, SamplingParams, StepPlan
from penstock.scheduler.worker_config import WorkerConfig

NUM_ADAPTERS = 4
PROMPT = 128
TARGET_STEP, TARGET_P99 = 1.15, 1.5


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both figures, with what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", choices=["none", "int8", "int4"], default="none")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--rank", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="pairs of steps, and streamed steps / 4 (default: 100)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(folder)
        spec = check_checkpoint(folder, weights=False).spec
        paths = [_write_adapter(folder / f"adapter{n}", spec, arguments.rank, n) for n in range(NUM_ADAPTERS)]
        config = WorkerConfig(
            model=name, backend="cpu", load_format="dummy", quantization=arguments.quantization,
            num_threads=arguments.threads, num_blocks=arguments.rows * 64, max_model_len=1024,
            max_num_batched_tokens=PROMPT, max_loras=NUM_ADAPTERS, max_lora_rank=arguments.rank,
        )  # fmt: skip
        _measure_steps(config, spec, paths, arguments.rows, arguments.steps)
        asyncio.run(_measure_loads(config, paths, arguments.rows, 4 * arguments.steps))


def _write_adapter(path: Path, spec: ModelSpec, rank: int, seed: int) -> Path:
    generator = np.random.default_rng(seed)
    tensors = {}
    for linear, (rows, columns) in adapted_linears(spec).items():
        part = "self_attn" if linear.module in MODULES[:4] else "mlp"
        prefix = f"base_model.model.model.layers.{linear.layer}.{part}.{linear.module}.lora_"
        tensors[f"{prefix}A.weight"] = generator.standard_normal((rank, columns), dtype=np.float32) * np.float32(0.02)
        tensors[f"{prefix}B.weight"] = generator.standard_normal((rows, rank), dtype=np.float32) * np.float32(0.02)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def _measure_steps(config: WorkerConfig, spec: ModelSpec, paths: list[Path], num_rows: int, num_steps: int) -> None:
    backend: Backend = load_backend(config)
    for slot, path in enumerate(paths, start=1):
        backend.load_adapter(slot, read_adapter(path, spec, config.max_lora_rank))
    runner = Runner(backend)
    runner.warm()
    ratios, base_ms, mixed_ms = [], [], []
    for number in range(-5, num_steps):
        base_us, mixed_us = (
            _step_us(runner, num_rows, [0] if is_base else range(NUM_ADAPTERS + 1), number) for is_base in (True, False)
        )
        if number >= 0:
            ratios.append(mixed_us / base_us)
            base_ms.append(base_us / 1000)
            mixed_ms.append(mixed_us / 1000)
    print(
        f"step of {num_rows} rows, rank {config.max_lora_rank}, {config.quantization}: base "
        f"{statistics.median(base_ms):.1f} ms, with {NUM_ADAPTERS} adapters {statistics.median(mixed_ms):.1f} ms: "
        f"x{statistics.median(ratios):.3f} (wanted: at most x{TARGET_STEP})"
    )


def _step_us(runner: Runner, num_rows: int, slots: Sequence[int], number: int) -> int:
    """Returns the time of one step of decoding; the rows have these slots in turn."""
    added = [
        AddedRow(row, number, [1] * PROMPT, PROMPT, PROMPT - 1, list(range(row * 64, row * 64 + 16)),
                 SamplingParams(temperature=0.0), adapter=slot)
        for row, slot in zip(range(num_rows), itertools.cycle(slots))
    ]  # fmt: skip
    runner.run(StepPlan(0, [], added, [], [Chunk(row, PROMPT - 1, PROMPT) for row in range(num_rows)], []))
    result = runner.run(StepPlan(0, [], [], [], [], [Decode(row, 1) for row in range(num_rows)]))
    runner.run(StepPlan(0, list(range(num_rows)), [], [], [], []))
    return result.computed_us


async def _measure_loads(config: WorkerConfig, paths: list[Path], num_rows: int, num_steps: int) -> None:
    executor = WorkerProcess(config)
    await executor.start()
    results = executor.results()
    numbers = itertools.count()
    rows = range(num_rows)

    async def stream(count: int) -> list[float]:
        """Returns the times between tokens of new rows."""
        number = next(numbers)
        added = [
            AddedRow(row, number, [1] * 8, 8, 0, list(range(row * 64, (row + 1) * 64)), SamplingParams(temperature=0.0))
            for row in rows
        ]
        executor.submit(StepPlan(0, [*rows] if number else [], added, [], [Chunk(row, 0, 8) for row in rows], []))
        await anext(results)
        executor.submit(_decode(num_rows))
        times, last = [], time.monotonic()
        for _ in range(count):
            executor.submit(_decode(num_rows))
            await anext(results)
            now = time.monotonic()
            times.append(now - last)
            last = now
        await anext(results)
        return times

    async def load_forever() -> int:
        for number in itertools.count():
            load = AdapterLoad(1 + number % NUM_ADAPTERS, str(paths[number % len(paths)]))
            answer = await executor.load_adapter(load)
            assert not answer.error, answer.error
        return 0

    await stream(20)
    quiet = await stream(num_steps)
    loading = asyncio.create_task(load_forever())
    busy = await stream(num_steps)
    loading.cancel()
    await executor.stop()
    before, during = (1000 * float(np.percentile(times, 99)) for times in (quiet, busy))
    print(
        f"p99 between tokens of {num_rows} rows: {before:.1f} ms, and {during:.1f} ms while adapters are loaded one "
        f"after another: x{during / before:.2f} (wanted: at most x{TARGET_P99})"
    )


def _decode(num_rows: int) -> StepPlan:
    return StepPlan(0, [], [], [], [], [Decode(row, 1) for row in range(num_rows)])


if __name__ == "__main__":
    main()

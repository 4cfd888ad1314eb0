"""Where the time of a step goes on a CPU: one step of decoding of W1, and one of its prefill, by the kernels' stages.

16 rows with 128 tokens of prompt (--rows 1 --prompt 512 is W4), the shape of Qwen3-0.6B in bf16 (or --quantization),
weights made up. Each stage with its time, its share of the step, and the share of its limit that it reaches: the bytes
it must read at the memory's bandwidth, or its operations at the arithmetic's peak, whichever takes longer. Python's
share is what the step took beyond the stages.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpu_bench import ceilings
from cpu_bench.floors import HEAD_BYTES, LAYER_BYTES, SHAPES, Machine

from penstock.models.backends.base import load_backend
from penstock.models.backends.cpu.backend import CpuBackend
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, Decode, SamplingParams, StepPlan
from penstock.scheduler.worker_config import WorkerConfig

SHAPE = SHAPES["M1"]
PYTHON = "Python"
TARGET_PYTHON = 0.03


@dataclass(frozen=True)
class Batch:
    """Rows, and the tokens of each."""

    rows: int
    prompt: int
    output: int

    @property
    def blocks_a_row(self) -> int:
        """Of the KV cache."""
        return -(-(self.prompt + self.output) // 16)


@dataclass(frozen=True)
class Profile:
    """One step, or the medians of several, in seconds."""

    step: float
    stages: dict[str, float]
    """With PYTHON: what no other stage took, and so what lies between them too."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both profiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", choices=["none", "int8", "int4"], default="none")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each row's prompt (default: %(default)s)")
    parser.add_argument("--output", type=int, default=64, help="tokens of each row's output (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="prompts computed and decoded so often (default: 3)")
    arguments = parser.parse_args(argv)
    batch = Batch(arguments.rows, arguments.prompt, arguments.output)
    precision = "bf16" if arguments.quantization == "none" else arguments.quantization
    machine = ceilings.measure(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder))
        backend = load_backend(
            WorkerConfig(
                model=folder,
                backend="cpu",
                load_format="dummy",
                quantization=arguments.quantization,
                num_threads=arguments.threads,
                kv_cache_bytes=batch.rows * batch.blocks_a_row * 16 * SHAPE.kv_bytes * 2,
                max_model_len=batch.prompt + batch.output,
            )
        )
        assert isinstance(backend, CpuBackend)
        prefill, decode = measure(backend, batch, arguments.rounds)
    print(f"{precision}, {arguments.threads} threads; {machine.bytes_per_s / 1e9:.1f} GB/s, "
          f"{machine.operations_per_s(precision) / 1e9:,.0f} GOP/s")  # fmt: skip
    rows, prompt, context = batch.rows, batch.prompt, batch.prompt + batch.output / 2
    report(f"a step of decoding, {rows} rows, context {context:.0f}", decode,
           limits(machine, precision, rows, rows, context, is_prefill=False))  # fmt: skip
    report(f"a step of prefill, {rows} prompts of {prompt}", prefill,
           limits(machine, precision, rows * prompt, rows, prompt / 2, is_prefill=True))  # fmt: skip
    share = decode.stages[PYTHON] / decode.step
    print(f"Python's share of a step of decoding: {share:.1%} (wanted: under {TARGET_PYTHON:.0%})")


def write_config(folder: Path) -> None:
    """The model's shape, in Hugging Face's terms."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": SHAPE.hidden, "num_hidden_layers": SHAPE.layers, "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.kv_heads, "head_dim": SHAPE.head_dim, "intermediate_size": SHAPE.intermediate,
        "vocab_size": SHAPE.vocab, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 32_768, "attention_bias": False, "use_sliding_window": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def measure(backend: CpuBackend, batch: Batch, rounds: int) -> tuple[Profile, Profile]:
    """The steps of prefill, and those of decoding."""
    runner = Runner(backend)
    runner.warm()
    prefills, decodes = [], []
    sampling = SamplingParams(temperature=0.0)
    for number in range(rounds):
        rows, blocks = range(batch.rows), batch.blocks_a_row
        added = [
            AddedRow(row, number, [300 + (number + row * 7 + i) % 3700 for i in range(batch.prompt)], batch.prompt, 0,
                     list(range(row * blocks, (row + 1) * blocks)), sampling)
            for row in rows
        ]  # fmt: skip
        chunks = [Chunk(row, 0, batch.prompt) for row in rows]
        prefills.append(timed(backend, runner, StepPlan(0, [], added, [], chunks, [])))
        plan = StepPlan(0, [], [], [], [], [Decode(row, 1) for row in rows])
        decodes += [timed(backend, runner, plan) for _ in range(batch.output - 1)]
        runner.run(StepPlan(0, list(rows), [], [], [], []))
    return median(prefills), median(decodes)


def timed(backend: CpuBackend, runner: Runner, plan: StepPlan) -> Profile:
    """One step."""
    before = backend.seconds()
    step = runner.run(plan).computed_us / 1e6
    stages = {name: value - before[name] for name, value in backend.seconds().items()}
    return Profile(step, {**stages, PYTHON: step - sum(stages.values())})


def median(profiles: Sequence[Profile]) -> Profile:
    """Of each figure by itself."""
    names = profiles[0].stages
    return Profile(
        statistics.median(profile.step for profile in profiles),
        {name: statistics.median(profile.stages[name] for profile in profiles) for name in names},
    )


def limits(
    machine: Machine, precision: str, tokens: int, rows: int, context: float, *, is_prefill: bool
) -> dict[str, float]:
    """The least seconds of the stages that have a limit worth naming; ``context`` is what a token attends to, on the
    average."""
    attention = SHAPE.hidden * SHAPE.head_dim
    weights = {
        "qkv": SHAPE.layers * attention * (SHAPE.heads + 2 * SHAPE.kv_heads),
        "output": SHAPE.layers * attention * SHAPE.heads,
        "gate and up": SHAPE.layers * 2 * SHAPE.hidden * SHAPE.intermediate,
        "down": SHAPE.layers * SHAPE.hidden * SHAPE.intermediate,
        "head": SHAPE.head_weights,
    }
    found = {}
    for name, count in weights.items():
        each = (HEAD_BYTES if name == "head" else LAYER_BYTES)[precision]
        times = rows if name == "head" else tokens
        found[name] = max(count * each / machine.bytes_per_s, 2 * count * times / machine.operations_per_s(precision))
    computed = SHAPE.attention_operations(tokens * context) / machine.bf16_operations_per_s
    found["attention"] = (
        computed if is_prefill else max(computed, rows * context * SHAPE.kv_bytes / machine.bytes_per_s)
    )
    return found


def report(title: str, profile: Profile, least: dict[str, float]) -> None:
    """A table."""
    print(
        f"\n{title}: {profile.step * 1000:.2f} ms\n\n| stage | ms | of the step | of its limit |\n|---|---:|---:|---:|"
    )
    for name, seconds in sorted(profile.stages.items(), key=lambda item: -item[1]):
        if seconds > 0:
            reached = f"{least[name] / seconds:.0%}" if name in least else ""
            print(f"| {name} | {seconds * 1000:.3f} | {seconds / profile.step:.1%} | {reached} |")


if __name__ == "__main__":
    main()

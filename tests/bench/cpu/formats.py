"""What formats of weights cost on a CPU: memory of experts beside the bytes in the file, and decoding from GGUF files.

A mixture of experts with made-up weights, about 230 million of them, is written in bf16, in MXFP4 and as GGUF files.
Each is loaded by the cpu backend. Then a Q8_0 file and the same weights with --quantization int8 decode in turns, as do
a Q4_0 file and int4.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from gguf import GGMLQuantizationType as QuantType
from model_files.gguf_files import write_gguf
from model_files.mxfp4_files import turn_to_mxfp4

from penstock.kernels.cpu.bindings import LANES
from penstock.models.backends.base import load_backend
from penstock.models.backends.cpu.backend import CpuBackend
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, Decode, SamplingParams, StepPlan
from penstock.scheduler.worker_config import WorkerConfig

VOCAB_SIZE = 4096
PROMPT = 16
MAX_RATIO = 1.1
"""The target of memory: the experts' bytes beside those in the file."""
KEPT = ("MXFP4", "Q4_0 GGUF")
"""The files whose experts stay as they are stored."""


@dataclass(frozen=True)
class Way:
    """A file, and how it is loaded."""

    name: str
    path: Path
    quantization: str = "none"

    def load(self, threads: int, rows: int, tokens: int) -> CpuBackend:
        """Loads it with KV for the rows."""
        config = WorkerConfig(
            str(self.path), backend="cpu", dtype="bfloat16", quantization=self.quantization, num_threads=threads,
            max_num_seqs=rows, max_model_len=tokens, num_blocks=rows * -(-tokens // 16),
        )  # fmt: skip
        backend = load_backend(config)
        assert isinstance(backend, CpuBackend)
        return backend


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--experts", type=int, default=16, help="in each layer (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="that decode (default: 1 8)")
    parser.add_argument("--steps", type=int, default=64, help="of each run (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=15, help="of runs (default: %(default)s)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        ways = write_models(Path(folder), args.hidden, args.layers, args.experts)
        gc.collect()
        print(f"{args.threads} threads\n\n{'':>12}{'experts, MiB':>28}{'':>9}{'all weights, MiB':>24}")
        print(f"{'':>12}{'in the file':>14}{'in memory':>14}{'ratio':>9}{'packed':>12}{'RSS grew':>12}")
        for way in ways.values():
            report_memory(way, args.threads)
        for one, other in (("Q8_0 GGUF", "int8"), ("Q4_0 GGUF", "int4")):
            for rows in args.rows:
                compare([ways[one], ways[other]], args.threads, rows, args.steps, args.pairs)


def write_models(folder: Path, hidden: int, layers: int, experts: int) -> dict[str, Way]:
    """Writes the same weights in every format."""
    config = transformers.GptOssConfig(
        vocab_size=VOCAB_SIZE, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=layers, head_dim=64,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 256), num_local_experts=experts,
        num_experts_per_tok=min(4, experts), max_position_embeddings=2048, rope_parameters={"rope_theta": 10_000.0},
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    module: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain, mxfp4 = folder / "bf16", folder / "mxfp4"
    for path in (plain, mxfp4):
        module.save_pretrained(path)
    turn_to_mxfp4(mxfp4)
    ways = [Way("bf16", plain), Way("int8", plain, "int8"), Way("int4", plain, "int4"), Way("MXFP4", mxfp4)]
    ways += [
        Way(f"{kind.name} GGUF", write_gguf(folder / f"{kind.name}.gguf", module, kind))
        for kind in (QuantType.Q8_0, QuantType.Q4_0)
    ]
    return {way.name: way for way in ways}


def report_memory(way: Way, threads: int) -> None:
    """Prints a row of the first table."""
    info = check_checkpoint(way.path)
    parts = [entry for name, entry in info.tensors.items() if ".experts." in name and len(entry.shape) == 2]
    parts += [part for name, one in info.quantized.items() if ".experts." in name for part in one.parts.values()]
    in_file = sum(part.num_bytes for part in parts)
    process = psutil.Process()
    before = process.memory_info().rss
    backend = way.load(threads, rows=1, tokens=16)
    grown, packed = process.memory_info().rss - before, experts_bytes(backend)
    ratio = packed / in_file
    missed = " (target missed)" if way.name in KEPT and ratio > MAX_RATIO else ""
    sizes = "".join(f"{size / 2**20:>{width}.1f}" for size, width in ((in_file, 14), (packed, 14)))
    print(
        f"{way.name:>12}{sizes}{ratio:>9.3f}{backend.facts.weight_bytes / 2**20:>12.1f}{grown / 2**20:>12.1f}{missed}"
    )


def experts_bytes(backend: CpuBackend) -> int:
    """Returns the bytes of all packed matrices of experts."""
    _, _, experts, _ = backend.model.parts
    assert isinstance(experts, list)
    linears = [linear for layer in experts for mlp in layer for linear in (mlp.gate_up, mlp.down)]
    matrices = [part for linear in linears for part in linear.parts[: linear.num_parts]]
    return sum(-(-matrix.rows // LANES) * matrix.panel_bytes for matrix in matrices)


def compare(ways: Sequence[Way], threads: int, rows: int, steps: int, pairs: int) -> None:
    """Prints how fast two decode, in turns, so that both see the same changes of the machine's speed."""
    runners = [Runner(way.load(threads, rows, PROMPT + steps + 1)) for way in ways]
    for runner in runners:
        tokens_per_s(runner, rows, steps)
    speeds: list[list[float]] = [[], []]
    for pair in range(pairs):
        for number in (0, 1) if pair % 2 else (1, 0):
            speeds[number].append(tokens_per_s(runners[number], rows, steps))
    ratios = sorted(first / second for first, second in zip(*speeds, strict=True))
    low, high = (ratios[int(part * (pairs - 1))] for part in (0.1, 0.9))
    first, second = (f"{way.name} {statistics.median(found):,.1f}" for way, found in zip(ways, speeds, strict=True))
    print(
        f"\n{rows} rows, tokens/s: {first}, {second}; ratio {statistics.median(ratios):.3f} "
        f"({low:.3f} to {high:.3f} in 80 % of {pairs} pairs)"
    )


def tokens_per_s(runner: Runner, rows: int, steps: int) -> float:
    """Returns the speed of decoding after a short prompt."""
    blocks = -(-(PROMPT + steps + 1) // 16)
    sampling = SamplingParams(temperature=0.0)
    added = [
        AddedRow(row, 0, [(7 * row + number) % VOCAB_SIZE for number in range(PROMPT)], PROMPT, 0,
                 list(range(row * blocks, (row + 1) * blocks)), sampling)
        for row in range(rows)
    ]  # fmt: skip
    runner.run(StepPlan(0, [], added, [], [Chunk(row, 0, PROMPT) for row in range(rows)], []))
    plan = StepPlan(0, [], [], [], [], [Decode(row, 1) for row in range(rows)])
    began = time.perf_counter()
    for _ in range(steps):
        runner.run(plan)
    taken = time.perf_counter() - began
    runner.run(StepPlan(0, list(range(rows)), [], [], [], []))
    return rows * steps / taken


if __name__ == "__main__":
    main()

"""What a row of a hybrid takes in memory, and how fast it decodes, with a short context and with a long one, on a CPU.

Models have the shapes of published ones and made-up weights. Both contexts take turns, so that a busy machine slows
both down. A step with the long context reads more: the KV of the layers that have attention, in bf16, or in eight bits
with --quantization int8 or int4, or --kv-cache-dtype int8. The same model with attention in all layers would have the
KV in the last column.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.models.backends.base import Backend, load_backend
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import NO_SLOT, AddedRow, Chunk, Decode, SamplingParams, StepPlan
from penstock.scheduler.worker_config import WorkerConfig

BLOCK_SIZE = 16
TARGET = 1.10
COMMON = {"max_position_embeddings": 131_072, "torch_dtype": "bfloat16"}
NEMOTRON_LAYERS = {"M": "mamba", "-": "mlp", "*": "attention"}
CONFIGS: dict[str, dict[str, Any]] = {
    # LFM2-1.2B
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_dim": 2048, "block_ff_dim": 12288,
        "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "conv_L_cache": 3,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "norm_eps": 1e-5, "num_attention_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1e6, "vocab_size": 65536,
    },
    # Qwen3.5-2B
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "vocab_size": 151936,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
    },
    # Nemotron-H-4B
    "nemotron-h": {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 3072,
        "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "layers_block_type": [
            NEMOTRON_LAYERS[letter] for letter in "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
        ],
        "mamba_num_heads": 112, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "vocab_size": 131072,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """What was measured of a model. Sizes are in bytes; lists are by context."""

    weight_bytes: int
    state_bytes: int
    kv_bytes: list[int]
    kv_bytes_of_attention: list[int]
    milliseconds: list[float]

    @property
    def bound(self) -> float:
        """What the longest context reads by what the shortest one reads."""
        return (self.weight_bytes + self.kv_bytes[-1]) / (self.weight_bytes + self.kv_bytes[0])


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CONFIGS), default=list(CONFIGS), help="default: all")
    parser.add_argument("--quantization", choices=["none", "int8", "int4"], default="none")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "int8"], default="auto")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--contexts", type=int, nargs=2, default=[100, 32_000], help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="8 steps at each context (default: %(default)s)")
    arguments = parser.parse_args(argv)
    contexts = sorted(arguments.contexts)
    figures = {name: measure(name, arguments, contexts) for name in arguments.models}
    print(f"\n{'memory of a row':16}{'state':>10}" + "".join(f"{f'KV at {n:,}':>18}" for n in contexts), end="")
    print(f"{'KV if all layers had attention':>34}")
    for name, of in figures.items():
        sizes = "".join(f"{mebibytes(size):>18}" for size in of.kv_bytes)
        print(f"{name:16}{mebibytes(of.state_bytes):>10}{sizes}{mebibytes(of.kv_bytes_of_attention[-1]):>34}")
    print(f"\n{'decoding step':16}{'weights':>10}" + "".join(f"{f'ms at {n:,}':>16}" for n in contexts), end="")
    print(f"{'ratio':>8}{'of what it reads':>20}")
    for name, of in figures.items():
        times = "".join(f"{time:16.1f}" for time in of.milliseconds)
        ratio = of.milliseconds[-1] / of.milliseconds[0]
        print(f"{name:16}{mebibytes(of.weight_bytes):>10}{times}{ratio:8.3f}{of.bound:20.3f}")
    print(f"\nwanted: a ratio of at most {TARGET}")


def mebibytes(size: int) -> str:
    """Returns a size as text."""
    return f"{size / 2**20:,.1f} MiB"


def commit_pages(backend: Backend) -> None:
    """Has the system commit the memory of the KV. Otherwise all of it would be the same page of zeros, in a cache."""
    backend.prefault()
    for thread in threading.enumerate():
        if thread.name == "pages":
            thread.join()


def measure(name: str, arguments: argparse.Namespace, contexts: Sequence[int]) -> Figures:
    """Measures a model with rows whose context is that long."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**CONFIGS[name], **COMMON}))
        longest = contexts[-1] + 64
        num_blocks = -(-longest // BLOCK_SIZE)
        config = WorkerConfig(
            folder, backend="cpu", quantization=arguments.quantization, load_format="dummy",
            kv_cache_dtype=arguments.kv_cache_dtype, num_threads=arguments.threads, num_blocks=num_blocks + 8,
            max_model_len=longest, max_num_seqs=4,
        )  # fmt: skip
        backend, spec = load_backend(config), check_checkpoint(Path(folder), weights=False).spec
    facts = backend.facts
    assert backend.states is not None, "each of these models has recurrent layers"
    token_bytes = facts.kv_bytes // facts.num_blocks / BLOCK_SIZE
    runner = Runner(backend)
    runner.warm()
    commit_pages(backend)
    backend.states.begin(1, NO_SLOT)
    blocks = list(range(num_blocks))
    times: dict[int, list[int]] = {context: [] for context in contexts}
    for number in range(arguments.rounds + 1):
        for context in contexts:
            row = AddedRow(
                0, number, [1] * (context + 1), context + 1, context, blocks, SamplingParams(temperature=0.0),
                state_slot=0, state_source=1,
            )  # fmt: skip
            runner.run(StepPlan(0, [], [row], [], [Chunk(0, context, context + 1)], []))
            for _ in range(8):
                step_us = runner.run(StepPlan(0, [], [], [], [], [Decode(0, 1)])).computed_us
                if number:  # the first round warms up
                    times[context].append(step_us)
            runner.run(StepPlan(0, [0], [], [], [], []))
    kv = [round(token_bytes * context) for context in contexts]
    layers = range(spec.num_layers)
    share = sum(map(spec.has_mixer, layers)) / sum(map(spec.attends, layers))
    return Figures(
        facts.weight_bytes, facts.state_bytes, kv, [round(size * share) for size in kv],
        [statistics.median(times[context]) / 1e3 for context in contexts],
    )  # fmt: skip


if __name__ == "__main__":
    main()

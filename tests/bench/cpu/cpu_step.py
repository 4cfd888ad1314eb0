"""Where the time of a step goes on a CPU: one step of decoding of W1, and one of its prefill, by the kernels' stages.

16 rows with 128 tokens of prompt (--rows 1 --prompt 512 is W4), the shape of Qwen3-0.6B in bf16 (or --quantization),
weights made up. The measurement and the tables are those of `penstock profile`; the limits are what torch reads and
computes, as for the floors of `make bench-cpu`, and all prompts are computed in one step. Python's share is what the
step took beyond the stages.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cpu_bench import ceilings
from cpu_bench.floors import write_config

from penstock.models.backends.cpu.stage_limits import MachineLimits
from penstock.models.executor.step_profile import ProfiledLoad
from penstock.models.worker.step_profile import PYTHON, profile_model
from penstock.scheduler.worker_config import WorkerConfig
from penstock.service.app.profile import describe

TARGET_PYTHON = 0.03


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
    load = ProfiledLoad(
        arguments.rows, arguments.prompt, arguments.output, arguments.rounds, arguments.rows * arguments.prompt
    )
    machine = ceilings.measure(arguments.threads)
    limits = MachineLimits(
        machine.bytes_per_s,
        {"bfloat16": machine.bf16_operations_per_s, "int8": machine.int8_operations_per_s},
    )
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder))
        config = WorkerConfig(
            model=folder,
            backend="cpu",
            load_format="dummy",
            quantization=arguments.quantization,
            num_threads=arguments.threads,
            num_blocks=2 * load.rows * load.blocks_per_row,
            max_model_len=arguments.prompt + arguments.output,
        )
        profile = profile_model(config, load, machine=limits)
    print("\n".join(describe(profile, load)))
    decode = profile.steps[0]
    share = sum(stage.share for stage in decode.stages if stage.name == PYTHON)
    print(f"\nPython's share of a step of decoding: {share:.1%} (wanted: under {TARGET_PYTHON:.0%})")


if __name__ == "__main__":
    main()

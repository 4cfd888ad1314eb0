"""Measures the CUDA backend on this machine's GPU, with made-up weights of real shapes, in at most 8 minutes.

    make bench-gpu                                  everything
    make bench-gpu ARGS='--parts ceilings kernels'  some parts, by how their names begin
    TINY=1 make bench-gpu                           the same with tiny shapes, in Triton's interpreter on a CPU

It measures the limits of the GPU first: bytes copied and products per second. Then come every kernel beside its
reference and its limit, whole models beside fp32, steps of decoding and prompts beside their floors, the service's
start and throughput, the same requests on transformers, and the cost of --deterministic. What could not be measured is
listed with the reason. The command fails if a result is wrong or nothing was measured, never because of a figure.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

SECONDS = 475.0
"""The default limit for all parts together."""


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, in the interpreter")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all parts together ({SECONDS:.0f})")
    parser.add_argument(
        "--json", type=Path, required=True, metavar="FILE", help="every figure, written after each part"
    )
    arguments = parser.parse_args()
    if arguments.tiny:
        # Before anything imports Triton.
        os.environ["TRITON_INTERPRET"] = "1"
    # Whether there is CUDA is asked in a way that does not start it: this process's copies will.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    from gpu_bench import report
    from gpu_bench.parts import Results, parts, run
    from gpu_bench.sizes import FULL, TINY

    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    began, results = time.monotonic(), Results()
    results.about = {"date": time.strftime("%Y-%m-%d %H:%M"), "command": " ".join(sys.argv[1:]), "tiny": arguments.tiny}
    for part in parts(TINY if arguments.tiny else FULL):
        if arguments.parts is None or any(part.name.startswith(name) for name in arguments.parts):
            run(part, arguments.seconds - (time.monotonic() - began), results)
            results.about["seconds"] = time.monotonic() - began
            arguments.json.write_text(json.dumps(report.as_json(results), indent=1) + "\n")
    print("\n" + report.as_text(results))
    checked = results.tables["kernels"] + results.tables["accuracy"] + results.tables["host_memory"]
    return 0 if any(results.tables.values()) and all(line["is_right"] for line in checked) else 1


if __name__ == "__main__":
    sys.exit(main())

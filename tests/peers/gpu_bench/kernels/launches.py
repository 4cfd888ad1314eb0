"""Launches kernels and measures nothing, for a profiler that runs this as its command:

    ncu --profile-from-start off ... python -P -m gpu_bench.kernels.launches attention gemm

Only the launches themselves are between the profiler's start and stop, not those that make the inputs.
"""

import sys
from collections.abc import Sequence

import torch

from gpu_bench.kernels import attention, layers
from gpu_bench.kernels.cases import Make
from gpu_bench.sizes import FULL, Sizes

RUNS = 3
"""The first one warms caches."""


def launch(words: Sequence[str], sizes: Sizes) -> list[str]:
    """Runs every case of the last model whose kernel's name begins with one of the words. Returns their names."""
    device, model, launched = torch.device(sizes.device), sizes.models[-1], list[str]()
    makers: list[Make] = [*layers.CASES, *attention.CASES, *layers.DENSE]
    for make in makers:
        torch.manual_seed(0)
        case = make(model, sizes, device)
        if not case.kernel.startswith(tuple(words)):
            continue
        case.run()  # compiles it
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        for _ in range(RUNS):
            case.run()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        launched.append(f"{case.kernel}: {case.text}")
    return launched


if __name__ == "__main__":
    print("\n".join(launch(sys.argv[1:], FULL)))

"""What this machine does at best: bytes read a second, and operations of matrix products.

Memory that no cache holds is read by torch's sum and by the patterns of ``bandwidth``; products are oneDNN's. The best
of many short runs counts, since what else the machine does can only slow them down.
"""

import time
from collections.abc import Callable

import torch

from cpu_bench.bandwidth.measure import best_reading
from cpu_bench.floors import Machine
from penstock.kernels.reference.onednn_amx import avoid_broken_tiles

READ_BYTES = 1 << 30
SIDE = 2048
SECONDS = 2.0


def measure(threads: int) -> Machine:
    """With so many threads."""
    avoid_broken_tiles()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            rate, pattern = _read(threads)
            return Machine(rate, max(_product(torch.float32), _product(torch.bfloat16)), _int8(), pattern)
    finally:
        torch.set_num_threads(before)


def _read(threads: int) -> tuple[float, str]:
    """Returns the bytes per second of the fastest pattern, and which one that is."""
    numbers = torch.ones(READ_BYTES // 4)
    summed = (READ_BYTES / _best(numbers.sum), "torch's sum")
    del numbers
    found = best_reading(READ_BYTES, threads)
    return summed if found is None or found[0] < summed[0] else (found[0], str(found[1]))


def _product(dtype: torch.dtype) -> float:
    """Of float32 too: where no instruction multiplies bf16, whoever multiplies its weights widens them first."""
    one, other = torch.randn(SIDE, SIDE).to(dtype), torch.randn(SIDE, SIDE).to(dtype)
    return 2 * SIDE**3 / _best(lambda: torch.nn.functional.linear(one, other))


def _int8() -> float:
    """With sums left in float32: for other outputs oneDNN has, without AVX512, only its reference loop."""
    weights = torch.randint(-127, 127, (SIDE, SIDE), dtype=torch.int8)
    inputs = torch.randint(0, 255, (SIDE, SIDE), dtype=torch.uint8)
    packed = torch.ops.onednn.qlinear_prepack(weights, [SIDE, SIDE])
    scales, zeros = torch.full((SIDE,), 0.01), torch.zeros(SIDE, dtype=torch.int64)
    return (
        2
        * SIDE**3
        / _best(
            lambda: torch.ops.onednn.qlinear_pointwise(
                inputs, 0.01, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
            )
        )
    )


def _best(run: Callable[[], object]) -> float:
    """Seconds."""
    best = float("inf")
    end = time.perf_counter() + SECONDS
    run()
    while (began := time.perf_counter()) < end:
        run()
        best = min(best, time.perf_counter() - began)
    return best

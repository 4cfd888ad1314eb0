"""Measures what a rank does at best in plain torch, so that the layers can be divided among stages."""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from penstock.models.backends.pipeline_parallel import StageSpeed

COLUMNS = 1024
LEAST_BYTES, MOST_BYTES = 4 << 20, 256 << 20
"""The limits of the memory that is read: a small model's weights may fit into caches."""
ROWS, TOKENS = 1024, 64
"""The shape of the product whose operations are counted."""
SECONDS = 0.3
"""How long each is repeated."""


@torch.inference_mode()
def measure_rank_speed(dtype: torch.dtype, device: torch.device, weight_bytes: int) -> StageSpeed:
    """Multiplies by one row, for the bytes that are read, and by many, for the operations. ``weight_bytes`` are those
    of the model."""
    num_bytes = min(MOST_BYTES, max(LEAST_BYTES, weight_bytes))
    read = torch.ones(max(ROWS, num_bytes // (COLUMNS * dtype.itemsize)), COLUMNS, dtype=dtype, device=device)
    multiplied = read[:ROWS]
    one, many = (torch.ones(count, COLUMNS, dtype=dtype, device=device) for count in (1, TOKENS))
    read_s = _best(lambda: functional.linear(one, read), device)
    multiply_s = _best(lambda: functional.linear(many, multiplied), device)
    return StageSpeed(read.nbytes / read_s, 2.0 * multiplied.numel() * TOKENS / multiply_s)


def _best(run: Callable[[], Tensor], device: torch.device) -> float:
    """Returns the least seconds that it takes."""
    best, end = float("inf"), time.perf_counter() + SECONDS
    run()
    while True:
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        now = time.perf_counter()
        best = min(best, now - began)
        if now > end:
            return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

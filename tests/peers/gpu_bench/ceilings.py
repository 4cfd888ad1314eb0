"""What the device does at best: bytes copied a second, and operations of a large product."""

from collections.abc import Callable

import torch

from gpu_bench.figures import Ceiling
from gpu_bench.sizes import Sizes
from gpu_bench.timing import seconds

COPIES = 20


def measure(sizes: Sizes) -> Ceiling:
    """In the dtype of the models."""
    device, dtype = torch.device(sizes.device), sizes.models[0].shape.dtype
    source = torch.ones(sizes.copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _copy_seconds(lambda: target.copy_(source), device)
    side = sizes.product_side
    # Random numbers: a product of zeros takes less power, and so less time.
    one, other = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(one)
    return Ceiling(copied, 2 * side**3 / seconds(lambda: torch.mm(one, other.t(), out=out), device))


def _copy_seconds(copy: Callable[[], object], device: torch.device) -> float:
    """Without a graph, whose copies take half as long again on an H200."""
    if device.type != "cuda":
        return seconds(copy, device)
    copy()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(COPIES):
        copy()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / COPIES

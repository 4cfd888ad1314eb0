"""How long the device takes for something, without what launches it."""

import statistics
import time
from collections.abc import Callable

import torch

FLUSHED_BYTES = 256 << 20
"""Written before each run, so that nothing of the last one is in a cache."""
RUNS = 20
SECONDS = 0.5
"""Of one measurement, at most, once there are some runs."""


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median of several runs, which were captured as a graph; where there is no CUDA, one run by the clock."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or (len(times) < RUNS and time.perf_counter() - began < SECONDS):
        # While this is written, what follows is launched.
        flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)

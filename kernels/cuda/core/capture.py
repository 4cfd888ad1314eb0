"""Captures CUDA graphs, and measures how long the GPU takes for what was captured."""

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

RUNS = 5
"""The number of times that something is measured."""


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Stops the collector, since a capture fails if the graphs of a discarded backend are freed meanwhile."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def seconds_on_gpu(run: Callable[[], object]) -> float:
    """Returns the median time that the GPU takes for what ``run`` launches. As in a step, a graph launches it, since
    the host can take longer to launch a small kernel than the GPU to run it, and caches hold nothing of the run before.

    Raises RuntimeError if it cannot be captured.
    """
    run()  # compiles it, and allocates what it keeps
    graph = torch.cuda.CUDAGraph()
    with without_garbage_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    flushed = torch.empty(2 * properties.L2_cache_size, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(RUNS):
        flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3)
    return statistics.median(times)

"""CUDA graphs of whole steps, by their size. Where there is no CUDA a graph is a call."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.models.cuda_step import Size

SMALL_STEPS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Sequences; above, multiples of 32."""
MIXED_STEPS = (64, 128, 256, 512)
"""Tokens of steps with longer sequences in them. In larger ones computing takes longer than launching."""


def graph_sizes(max_sequences: int, max_tokens: int, device: torch.device) -> list[Size]:
    """All that are captured, the smallest first. In the interpreter, where what fills a graph up takes as long as what
    counts, only a few that show that it does no harm."""
    if device.type != "cuda":
        return [Size(number, number, number, any_longer=False) for number in (1, 2, 4) if number <= max_sequences]
    steps = {number for number in (*SMALL_STEPS, *range(96, max_sequences, 32)) if number < max_sequences}
    decoding = [Size(number, number, number, any_longer=False) for number in sorted({*steps, max_sequences})]
    mixed = [
        Size(min(max_sequences, tokens), tokens, min(max_sequences, tokens), any_longer=True)
        for tokens in MIXED_STEPS
        if tokens <= max_tokens
    ]
    return decoding + mixed


class StepGraphs:
    """Steps that are launched as one."""

    def __init__(self, compute: Callable[[Size], Tensor], device: torch.device) -> None:
        """``compute`` launches a step of a size, on inputs that always lie at the same place."""
        self._compute = compute
        self._device = device
        self._sizes: list[Size] = []
        self._graphs: dict[Size, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def capture(self, sizes: Iterable[Size]) -> None:
        """Runs each once, so that nothing is set up while it is captured, and captures it; the largest first, since the
        others then find room in its memory. Inputs must be those of a step of no sequences."""
        self._sizes = list(sizes)
        for size in reversed(self._sizes):
            self._compute(size)
            self._capture(size)

    def find(self, size: Size) -> Size | None:
        """The smallest that a step fits into."""
        return next((known for known in self._sizes if size.fits(known)), None)

    def run(self, size: Size) -> None:
        """Computes a step of one of the sizes."""
        if self._device.type != "cuda":
            self._compute(size)
            return
        if size not in self._graphs:
            self._capture(size)
        self._graphs[size].replay()

    def clear(self) -> None:
        """Tensors that steps use have moved: each is captured anew when it is run."""
        self._graphs.clear()

    def _capture(self, size: Size) -> None:
        if self._device.type != "cuda":
            return
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: another one waits for the results of steps before.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._compute(size)
        self._pool = graph.pool()
        self._graphs[size] = graph

"""CUDA graphs of steps, by size. Without CUDA, a graph is a plain call."""

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch

from penstock.kernels.cuda.core.capture import without_garbage_collection
from penstock.kernels.cuda.model_shapes import ModelShape
from penstock.models.backends.cuda.steps.step_io import Size

Made = TypeVar("Made")
"""The result of the layers."""

SMALL_STEPS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Numbers of sequences; larger ones are multiples of 32."""
VERIFYING_STEPS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of tokens in steps whose sequences have any number of drafts and nothing longer."""
MIXED_STEPS = (64, 128, 256, 512, 1024, 2048)
"""Numbers of tokens in steps with longer sequences. In larger steps computing takes longer than launching, even for a
model of 0.6B."""


def graph_sizes(shape: ModelShape, device: torch.device) -> list[Size]:
    """Returns all sizes that are captured, each kind in ascending order. In the interpreter, where padding takes as
    long as real work, returns only a few, which show that padding does no harm."""
    most, verified, commits = shape.max_sequences, shape.max_queries[-1], shape.commits_states
    if device.type != "cuda":
        sizes = [Size(number, number, number, 1) for number in (1, 2, 4) if number <= most]
        if shape.max_sampled < 4 or verified == 1:
            return sizes
        return [*sizes, Size(min(most, 4), 4, 4, verified, commits=commits)]
    decoding = decoding_sizes(most)
    verifying = [
        Size(min(most, tokens), tokens, tokens, verified, commits=commits)
        for tokens in VERIFYING_STEPS
        if verified > 1 and tokens <= shape.max_sampled
    ]
    mixed = [
        Size(min(most, tokens), tokens, min(most, tokens), tokens, commits=commits)
        for tokens in MIXED_STEPS
        if tokens <= shape.max_tokens
    ]
    return decoding + verifying + mixed


def decoding_sizes(most: int) -> list[Size]:
    """Returns sizes for up to ``most`` sequences with one token each."""
    steps = {number for number in (*SMALL_STEPS, *range(96, most, 32)) if number < most}
    return [Size(number, number, number, 1) for number in sorted({*steps, most})]


class StepGraphs(Generic[Made]):
    """Steps in two launches: the layers, then the sampling of tokens, which may have to wait for masks."""

    def __init__(
        self, forward: Callable[[Size], Made], choose: Callable[[Size, Made], None], device: torch.device
    ) -> None:
        """Each launches one half of a step on inputs at fixed addresses. ``choose`` gets the result of ``forward``."""
        self._forward = forward
        self._choose = choose
        self._device = device
        self._sizes: list[Size] = []
        self._graphs: dict[Size, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph, Made]] = {}
        self._pool: Any = None

    def capture(self, sizes: Iterable[Size]) -> None:
        """Runs each size once, so that the capture sets nothing up, and captures it. The largest comes first, since the
        others then fit in its memory. The inputs must be those of a step without sequences."""
        self._sizes = list(sizes)
        for size in sorted(self._sizes, key=lambda size: size.tokens, reverse=True):
            self._choose(size, self._forward(size))
            self._capture(size)

    def find(self, size: Size) -> Size | None:
        """Returns the smallest size that a step fits into."""
        return next((known for known in self._sizes if size.fits(known)), None)

    def run(self, size: Size, wait: Callable[[], None]) -> Made:
        """Computes a step; calls ``wait`` before tokens are sampled. The next step overwrites the result."""
        if self._device.type != "cuda":
            made = self._forward(size)
            wait()
            self._choose(size, made)
            return made
        if size not in self._graphs:
            self._capture(size)
        layers, rest, made = self._graphs[size]
        layers.replay()
        wait()
        rest.replay()
        return made

    def clear(self) -> None:
        """Drops all graphs, since tensors have moved: each is captured again. Waits for the steps that have started."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._graphs.clear()
        # torch frees a pool with its last graph; a capture in that pool would fail.
        self._pool = None

    def _capture(self, size: Size) -> None:
        if self._device.type != "cuda":
            return
        layers, rest = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with without_garbage_collection():
            # Only this thread's calls: another thread waits for the results of earlier steps.
            with torch.cuda.graph(layers, pool=self._pool, capture_error_mode="thread_local"):
                made = self._forward(size)
            self._pool = layers.pool()
            # ``made`` is still referenced, so nothing else in this step reuses its memory.
            with torch.cuda.graph(rest, pool=self._pool, capture_error_mode="thread_local"):
                self._choose(size, made)
        self._graphs[size] = layers, rest, made

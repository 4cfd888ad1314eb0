"""CUDA graphs of steps, by their size. Where there is no CUDA a graph is a call."""

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch

from penstock.kernels.cuda.model_shapes import ModelShape
from penstock.models.backends.cuda.step_io import Size

Made = TypeVar("Made")
"""What the layers leave."""

SMALL_STEPS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Sequences; above, multiples of 32."""
VERIFYING_STEPS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Tokens of steps in which sequences have drafts, however many each, and nothing longer."""
MIXED_STEPS = (64, 128, 256, 512)
"""Tokens of steps with longer sequences in them. In larger ones computing takes longer than launching."""


def graph_sizes(shape: ModelShape, device: torch.device) -> list[Size]:
    """All that are captured, of each kind the smallest first. In the interpreter, where what fills a graph up takes as
    long as what counts, only a few that show that it does no harm."""
    most, verified = shape.max_sequences, shape.max_queries[-1]
    if device.type != "cuda":
        sizes = [Size(number, number, number, 1) for number in (1, 2, 4) if number <= most]
        return [*sizes, Size(min(most, 4), 4, 4, verified)] if shape.max_sampled >= 4 and verified > 1 else sizes
    decoding = decoding_sizes(most)
    verifying = [
        Size(min(most, tokens), tokens, tokens, verified)
        for tokens in VERIFYING_STEPS
        if verified > 1 and tokens <= shape.max_sampled
    ]
    mixed = [
        Size(min(most, tokens), tokens, min(most, tokens), tokens)
        for tokens in MIXED_STEPS
        if tokens <= shape.max_tokens
    ]
    return decoding + verifying + mixed


def decoding_sizes(most: int) -> list[Size]:
    """Of up to so many sequences, a token each."""
    steps = {number for number in (*SMALL_STEPS, *range(96, most, 32)) if number < most}
    return [Size(number, number, number, 1) for number in sorted({*steps, most})]


class StepGraphs(Generic[Made]):
    """Steps that are launched as two: the layers, and what chooses the tokens, which may have to wait for masks."""

    def __init__(
        self, forward: Callable[[Size], Made], choose: Callable[[Size, Made], None], device: torch.device
    ) -> None:
        """Each launches a half of a step of a size, on inputs that always lie at the same place. ``choose`` gets what
        ``forward`` returns."""
        self._forward = forward
        self._choose = choose
        self._device = device
        self._sizes: list[Size] = []
        self._graphs: dict[Size, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph, Made]] = {}
        self._pool: Any = None

    def capture(self, sizes: Iterable[Size]) -> None:
        """Runs each once, so that nothing is set up while it is captured, and captures it; the largest first, since the
        others then find room in its memory. Inputs must be those of a step of no sequences."""
        self._sizes = list(sizes)
        for size in sorted(self._sizes, key=lambda size: size.tokens, reverse=True):
            self._choose(size, self._forward(size))
            self._capture(size)

    def find(self, size: Size) -> Size | None:
        """The smallest that a step fits into."""
        return next((known for known in self._sizes if size.fits(known)), None)

    def run(self, size: Size, wait: Callable[[], None]) -> Made:
        """Computes a step of one of the sizes; ``wait`` is called before tokens are chosen. Returns what ``forward``
        made, which the next step overwrites."""
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
        """Tensors that steps use have moved: each is captured anew when it is run."""
        self._graphs.clear()

    def _capture(self, size: Size) -> None:
        if self._device.type != "cuda":
            return
        layers, rest = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Of this thread alone: another one waits for the results of steps before.
        with torch.cuda.graph(layers, pool=self._pool, capture_error_mode="thread_local"):
            made = self._forward(size)
        self._pool = layers.pool()
        # While what was made is held, nothing else of this step takes its memory.
        with torch.cuda.graph(rest, pool=self._pool, capture_error_mode="thread_local"):
            self._choose(size, made)
        self._graphs[size] = layers, rest, made

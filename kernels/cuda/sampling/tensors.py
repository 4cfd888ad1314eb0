"""What the sampler's kernels work on: rows with their parameters, a step's lines, and room for what comes between.

A line is one of a step's rows of logits, from which one token is chosen. A row has several where drafts are verified.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

NUM_NUMBERS = tl.constexpr(8)
TEMPERATURE = tl.constexpr(0)
TOP_P = tl.constexpr(1)
LEAST_SCORE = tl.constexpr(2)
REPETITION = tl.constexpr(3)
PRESENCE = tl.constexpr(4)
FREQUENCY = tl.constexpr(5)
"""Columns of ``SamplerRows.numbers``."""

NUM_INTEGERS = tl.constexpr(8)
SEED = tl.constexpr(0)
TOP_K = tl.constexpr(1)
COUNTS = tl.constexpr(2)
BIASES = tl.constexpr(3)
FREE_FROM = tl.constexpr(4)
FIRST_STOP = tl.constexpr(5)
FIRST_WORD = tl.constexpr(6)
WORDS_END = tl.constexpr(7)
"""Columns of ``SamplerRows.integers``."""


MAX_VOCAB = 1 << 18


@dataclass(frozen=True)
class SamplerShape:
    """What the kernels are compiled for."""

    vocab_size: int
    """V, up to ``MAX_VOCAB``."""
    dtype: torch.dtype
    """Of logits."""
    stride: int
    """Entries from one line of logits to the next; best a multiple of 16."""
    max_history: int
    """Tokens that a row may have: L."""
    slice: int = 2048
    """Tokens of the vocabulary that a program takes, a power of 2. Always as many: how many rows there are must not
    change the order in which numbers are added."""
    bins: int = 1024
    """By which filters narrow down where they end; a power of 2."""
    listed: int = 4096
    """Tokens among which they then look; a power of 2. Where more share a bin it only takes longer."""

    def __post_init__(self) -> None:
        assert 0 < self.vocab_size <= MAX_VOCAB, "sums of fixed-point numbers would overflow"
        assert self.vocab_size <= self.stride

    @property
    def slices(self) -> int:
        """Of a vocabulary."""
        return -(-self.vocab_size // self.slice)

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask: bit i of word w is token 32 w + i."""
        return -(-self.vocab_size // 32)

    @property
    def num_warps(self) -> int:
        """Of a program that holds a slice: 8 tokens a thread. With 16 a program takes so many registers that few run at
        a time."""
        return min(max(self.slice // 256, 1), 16)


@dataclass(frozen=True)
class SamplerRows:
    """R rows, which keep their numbers from step to step, and what they ask for."""

    numbers: Tensor
    """(R, 8) float64, each line by ``number_line``."""
    integers: Tensor
    """(R, 8) int64, each line by ``integer_line``."""
    histories: Tensor
    """(R, L) int32: what stands before each line's position, drafts included. Read of rows with words, and of drafts
    where tokens are counted."""
    counts: Tensor
    """(C, V) int32: 0 for a token that is not in a row's prompt or output, else 1 more than its output has of it. A row
    with penalties has a line of its own; drafts do not count."""
    biases: Tensor
    """(B, V) float32: what is added to logits. So has a row with biases."""
    word_starts: Tensor
    """(Q + 1,) int32: where each word begins in ``word_tokens``. A stop is a word of one token."""
    word_tokens: Tensor
    """(P,) int32."""


@dataclass(frozen=True)
class Lines:
    """N lines of a step, of which only the first ``num_lines`` count: the others fill a graph's buffers."""

    num_lines: Tensor
    """(1,) int32."""
    rows: Tensor
    """(N,) int32."""
    positions: Tensor
    """(N,) int32: the index that the token will have in the row's history."""
    num_drafts: Tensor
    """(N,) int32: how many tokens right before that position are drafts."""
    masks: Tensor
    """(N,) int32: which of ``mask_words`` tells the tokens that are allowed; negative: all."""
    mask_words: Tensor
    """(M, ceil(V / 32)) int32: bit i of word w is token 32 w + i."""


@dataclass(frozen=True)
class SamplerRoom:
    """What kernels hand on to each other, for N lines. Its contents mean nothing between steps."""

    scores: Tensor
    """(N, V) float32: logits with penalties and biases, minus infinity where masked."""
    forbidden: Tensor
    """(N, ceil(V / 32)) int32: tokens that must not come next, where ``num_forbidden`` is not 0."""
    num_forbidden: Tensor
    """(N,) int32."""
    best: Tensor
    """(N, 2, slices) float32: the best of a slice that is not forbidden, and the best of all; a NaN is infinite."""
    best_ids: Tensor
    """(N, 2, slices) int32: their tokens, of equal ones the lowest."""
    masses: Tensor
    """(N, slices) int64."""
    binned: Tensor
    """(N, bins) int64."""
    listed: Tensor
    """(N, listed) int64: keys."""
    num_listed: Tensor
    """(N,) int32; more than there is room for if not all are there."""
    thresholds: Tensor
    """(N,) int64: the least key that filters keep."""
    drawn: Tensor
    """(N, slices) float64: the best sum of score and noise."""
    drawn_ids: Tensor
    """(N, slices) int32."""


def number_line(
    temperature: float, top_p: float, min_p: float, repetition: float, presence: float, frequency: float
) -> list[float]:
    """A row's line of ``SamplerRows.numbers``."""
    # The score of the best token is 0, and what min_p is compared with is float32.
    likely = float(np.float32(min_p))
    least = float(np.float32(math.log(likely))) if likely > 0.0 else -math.inf
    used = [temperature, top_p, least, repetition, presence, frequency]
    return used + [0.0] * (NUM_NUMBERS.value - len(used))


def integer_line(
    seed: int,
    top_k: int,
    counts: int = -1,
    biases: int = -1,
    free_from: int = 0,
    words: tuple[int, int, int] = (0, 0, 0),
) -> list[int]:
    """A row's line of ``SamplerRows.integers``.

    ``seed`` has 64 bits. ``counts`` and ``biases`` are the row's lines there, negative if it has none. ``words`` are
    the first stop, the first bad word behind the stops, and the end of these; stops are forbidden before position
    ``free_from``.
    """
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    return [signed, top_k, counts, biases, free_from, *words]


ROOM: dict[str, tuple[torch.dtype, *tuple[int | str, ...]]] = {
    "scores": (torch.float32, "vocab_size"),
    "forbidden": (torch.int32, "mask_words"),
    "num_forbidden": (torch.int32,),
    "best": (torch.float32, 2, "slices"),
    "best_ids": (torch.int32, 2, "slices"),
    "masses": (torch.int64, "slices"),
    "binned": (torch.int64, "bins"),
    "listed": (torch.int64, "listed"),
    "num_listed": (torch.int32,),
    "thresholds": (torch.int64,),
    "drawn": (torch.float64, "slices"),
    "drawn_ids": (torch.int32, "slices"),
}
"""Types and sizes, for a line, of what ``SamplerRoom`` has: numbers, or what of a ``SamplerShape``."""


def sizes_of(shape: SamplerShape, sizes: Sequence[int | str]) -> tuple[int, ...]:
    """As numbers."""
    return tuple(size if isinstance(size, int) else getattr(shape, size) for size in sizes)


def make_room(shape: SamplerShape, num_lines: int, device: torch.device) -> SamplerRoom:
    """For so many lines."""
    return SamplerRoom(
        **{
            name: torch.empty(num_lines, *sizes_of(shape, sizes), dtype=kind, device=device)
            for name, (kind, *sizes) in ROOM.items()
        }
    )

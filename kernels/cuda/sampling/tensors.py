"""The tensors of the sampler's kernels: rows with their parameters, a step's sampled positions, and intermediate
results.

One token is chosen for each sampled position, from its logits. A row has several sampled positions if drafts are
verified. In the code, a ``line`` is the index of a sampled position.
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
    """The shape that the kernels are compiled for."""

    vocab_size: int
    """V, up to ``MAX_VOCAB``."""
    dtype: torch.dtype
    """The dtype of logits."""
    stride: int
    """Entries from one row of logits to the next; preferably a multiple of 16."""
    max_history: int
    """The maximum number of tokens in a row, L."""
    slice: int = 2048
    """Tokens of the vocabulary per program, a power of 2. A constant, since the number of rows must not change the
    order in which numbers are added."""
    bins: int = 1024
    """Bins of the histogram with which filters narrow down their threshold; a power of 2."""
    listed: int = 4096
    """Tokens in a bin that filters can list and search; a power of 2. If more share a bin, the search only takes
    longer."""

    def __post_init__(self) -> None:
        assert 0 < self.vocab_size <= MAX_VOCAB, "sums of fixed-point numbers would overflow"
        assert self.vocab_size <= self.stride

    @property
    def slices(self) -> int:
        return -(-self.vocab_size // self.slice)

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask: bit i of word w is token 32 w + i."""
        return -(-self.vocab_size // 32)

    @property
    def num_warps(self) -> int:
        """Warps of a program that holds a slice: 8 tokens per thread. With 16, a program needs so many registers that
        few run at a time."""
        return min(max(self.slice // 256, 1), 16)


@dataclass(frozen=True)
class SamplerRows:
    """The sampling parameters of R rows, whose numbers stay the same from step to step."""

    numbers: Tensor
    """(R, 8) float64, each row made by ``number_line``."""
    integers: Tensor
    """(R, 8) int64, each row made by ``integer_line``."""
    histories: Tensor
    """(R, L) int32: the tokens before each sampled position, drafts included. Read for rows with words, and for drafts
    of rows that count tokens."""
    counts: Tensor
    """(C, V) int32: 0 for a token that is neither in a row's prompt nor in its output, else 1 plus its count in the
    output. Each row with penalties has its own index here; drafts are not counted."""
    biases: Tensor
    """(B, V) float32: added to logits. Each row with biases has its own index here."""
    word_starts: Tensor
    """(Q + 1,) int32: the start of each word in ``word_tokens``. A stop is a word of one token."""
    word_tokens: Tensor
    """(P,) int32."""


@dataclass(frozen=True)
class Lines:
    """The N sampled positions of a step. Only the first ``num_lines`` are used; the others pad a graph's buffers."""

    num_lines: Tensor
    """(1,) int32."""
    rows: Tensor
    """(N,) int32."""
    positions: Tensor
    """(N,) int32: the token's future index in the row's history."""
    num_drafts: Tensor
    """(N,) int32: the number of drafts directly before that position."""
    masks: Tensor
    """(N,) int32: the index in ``mask_words`` of the mask of allowed tokens; negative: all are allowed."""
    mask_words: Tensor
    """(M, ceil(V / 32)) int32: bit i of word w is token 32 w + i."""


def number_line(
    temperature: float, top_p: float, min_p: float, repetition: float, presence: float, frequency: float
) -> list[float]:
    """Returns a row's entry in ``SamplerRows.numbers``."""
    # The score of the best token is 0, and min_p is compared with float32 values.
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
    """Returns a row's entry in ``SamplerRows.integers``.

    ``seed`` has 64 bits. ``counts`` and ``biases`` are the row's indices there, negative if it has none. ``words`` are
    the indices of the first stop, of the first bad word, which follows the stops, and of the end of both; stops are
    forbidden before position ``free_from``.
    """
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    return [signed, top_k, counts, biases, free_from, *words]


WORKSPACE: dict[str, tuple[torch.dtype, *tuple[int | str, ...]]] = {
    # Logits with penalties and biases, minus infinity where masked.
    "scores": (torch.float32, "vocab_size"),
    # The mask of tokens that must not come next, and their number. The mask is valid if that is not 0.
    "forbidden": (torch.int32, "mask_words"),
    "num_forbidden": (torch.int32,),
    # The best logit of a slice that is not forbidden, and the best of all; NaN counts as infinite.
    "best": (torch.float32, 2, "slices"),
    # Their tokens; ties go to the lowest id.
    "best_ids": (torch.int32, 2, "slices"),
    "masses": (torch.int64, "slices"),
    "binned": (torch.int64, "bins"),
    # Keys, and their number: more than there is room for if some are missing.
    "listed": (torch.int64, "listed"),
    "num_listed": (torch.int32,),
    # The smallest key that filters keep.
    "thresholds": (torch.int64,),
    # The best sum of score and noise.
    "drawn": (torch.float64, "slices"),
    "drawn_ids": (torch.int32, "slices"),
}
"""The kernels' intermediate results, by name: their types, and their sizes per sampled position. A size is a number or
the name of an attribute of ``SamplerShape``. Nothing is kept between steps."""


def sizes_of(shape: SamplerShape, sizes: Sequence[int | str]) -> tuple[int, ...]:
    """The sizes as numbers."""
    return tuple(size if isinstance(size, int) else getattr(shape, size) for size in sizes)


def make_workspace(shape: SamplerShape, num_lines: int, device: torch.device) -> dict[str, Tensor]:
    """Allocates a ``WORKSPACE`` for ``num_lines`` sampled positions."""
    return {
        name: torch.empty(num_lines, *sizes_of(shape, sizes), dtype=kind, device=device)
        for name, (kind, *sizes) in WORKSPACE.items()
    }

"""The words that rows forbid, concatenated on the device: stops that come too early, and bad words."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

FIRST_WORDS = 1 << 12
FIRST_TOKENS = 1 << 14


class BadWordsPool:
    """Append-only arrays of words. When they are full, their owner starts a new pool with the words still in use.
    Kernels hold the arrays' addresses, so their sizes are fixed."""

    def __init__(self, device: torch.device, max_words: int = FIRST_WORDS, max_tokens: int = FIRST_TOKENS) -> None:
        self.starts = torch.zeros(max_words + 1, dtype=torch.int32, device=device)
        """(Q + 1,): word i is [starts[i], starts[i + 1]) of ``tokens``."""
        self.tokens = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        """(P,)."""
        self._num_words = 0
        self._num_tokens = 0

    def fits(self, words: Sequence[Sequence[int]]) -> bool:
        return self._num_words + len(words) < len(self.starts) and self._num_tokens + sum(map(len, words)) <= len(
            self.tokens
        )

    def add_words(self, words: Sequence[Sequence[int]]) -> int:
        """Adds words. Returns the index of the first; the others follow it."""
        first = self._num_words
        if words:
            tokens = np.concatenate([np.asarray(word, dtype=np.int32) for word in words])
            ends = self._num_tokens + np.cumsum([len(word) for word in words], dtype=np.int32)
            _copy(self.tokens[self._num_tokens : self._num_tokens + len(tokens)], tokens)
            _copy(self.starts[first + 1 : first + 1 + len(words)], ends)
            self._num_words += len(words)
            self._num_tokens += len(tokens)
        return first

    def empty(self) -> None:
        """Discards all words; the memory stays the same."""
        self._num_words = self._num_tokens = 0


def _copy(to: Tensor, values: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> None:
    source = torch.from_numpy(values)
    to.copy_(source.pin_memory() if to.is_cuda else source, non_blocking=True)

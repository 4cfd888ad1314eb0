"""The words that rows forbid, concatenated on the device: stops that come too early, and bad words."""

from collections.abc import Sequence

import numpy as np
import torch

from penstock.models.backends.torch_common.device import copy_to

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
            device = self.tokens.device
            self.tokens[self._num_tokens : self._num_tokens + len(tokens)] = copy_to(device, tokens)
            self.starts[first + 1 : first + 1 + len(words)] = copy_to(device, ends)
            self._num_words += len(words)
            self._num_tokens += len(tokens)
        return first

    def empty(self) -> None:
        """Discards all words; the memory stays the same."""
        self._num_words = self._num_tokens = 0

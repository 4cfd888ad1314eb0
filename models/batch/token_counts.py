"""Token counts of a row's history, for penalties. Updating them costs constant time per token."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The distinct tokens of a history, and how often each occurs in its output."""

    def __init__(self, history: list[int], num_prompt_tokens: int) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.empty(256, dtype=np.int64)
        self._output = np.zeros(256, dtype=np.int64)
        for token_id in dict.fromkeys(history):
            self._place_of(token_id)
        for token_id in history[num_prompt_tokens:]:
            self.count_token(token_id)

    def with_more(self, token_ids: Sequence[int]) -> "TokenCounts":
        """Returns a copy that also counts these tokens."""
        copy = TokenCounts([], 0)
        copy._place, copy._ids, copy._output = self._place.copy(), self._ids.copy(), self._output.copy()
        for token_id in token_ids:
            copy.count_token(token_id)
        return copy

    @property
    def ids(self) -> NDArray[np.int64]:
        """The distinct tokens of prompt and output."""
        return self._ids[: len(self._place)]

    @property
    def output(self) -> NDArray[np.int64]:
        """How often each of ``ids`` occurs in the output."""
        return self._output[: len(self._place)]

    def count_token(self, token_id: int) -> None:
        place = self._place_of(token_id)  # first: it may replace the array
        self._output[place] += 1

    def _place_of(self, token_id: int) -> int:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._output = np.concatenate((self._output, np.zeros_like(self._output)))
        self._ids[place] = token_id
        return place

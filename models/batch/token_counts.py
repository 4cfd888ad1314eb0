"""How often tokens occur in a row's history, kept up to date at constant cost for a token. For penalties."""

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
        """A copy in which these are counted too."""
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
        """How often each of ``ids`` was output."""
        return self._output[: len(self._place)]

    def count_token(self, token_id: int) -> None:
        """Counts one more output token."""
        place = self._place_of(token_id)  # first: it may replace the array
        self._output[place] += 1

    def _place_of(self, token_id: int) -> int:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._output = np.concatenate((self._output, np.zeros_like(self._output)))
        self._ids[place] = token_id
        return place

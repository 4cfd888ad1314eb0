"""What a step of so many tokens takes: measured when the worker starts, and kept up to date with what steps take."""

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

SIZES = (16, 1, 64, 4, 32, 8, 48, 2, 24, 12, 6, 3)
"""Tokens of the steps that are measured, in this order as far as time allows; what is between them is interpolated."""
MEASURE_S = 1.0
ROUNDS = 4
"""Times that each is measured where there is time; the shortest counts, since nothing makes a step too short."""
MIN_S = 1e-5

SCALE_RATE = 0.1
"""How fast what steps take changes the scale: load and contexts change all sizes alike, about, and soon."""
MEASURED_WEIGHT, GUESSED_WEIGHT, MAX_WEIGHT = 4, 1, 100
"""What is known of a size's own seconds, as if seen in so many steps."""
MAX_SURPRISE = 2.0
"""A step that took longer than was expected by more than this counts as this: something else came between."""
OBSERVED = 64
"""Steps until the table is made anew, where they tell little that is new."""


class StepCosts:
    """seconds(n) = scale * table[n], of a step of n tokens all of which are sampled.

    There are two scales: of steps that began when the last one was over, since drafts follow from its tokens; and of
    those that were there by then, which only a backend that runs ahead has.
    """

    def __init__(self, most: int, guess: tuple[float, float] = (1e-3, 2e-3)) -> None:
        """``most``: tokens of a step; ``guess``: what steps of 1 and of 64 take, until that is measured."""
        self.most = most
        self._sizes, self._seconds, self._weights = [1, 64], list(guess), [GUESSED_WEIGHT] * 2
        self._scales = [1.0, 1.0]
        self._num_observed = 0
        self._make_table()

    def measure(self, run: Callable[[int], None], most: int, clock: Callable[[], float]) -> None:
        """``run`` computes a step of so many tokens, up to ``most``; ``clock`` tells seconds."""
        best: dict[int, float] = {}
        end = clock() + MEASURE_S
        for number in range(ROUNDS * len(SIZES)):
            size = min(most, SIZES[number % len(SIZES)])
            began = clock()
            if began > end and len(best) >= min(2, most):
                break
            run(size)
            best[size] = min(best.get(size, float("inf")), max(MIN_S, clock() - began))
        self._sizes = sorted(best)
        self._seconds = [best[size] for size in self._sizes]
        self._weights = [MEASURED_WEIGHT] * len(best)
        self._make_table()

    def seconds(self, num_tokens: int, is_fenced: bool = True) -> float:
        """Of a step; ``is_fenced``: it begins when the last one is over."""
        return self._table[min(num_tokens, self.most)] * self._scales[is_fenced]

    def span(self, num_tokens: int, count: int) -> list[float]:
        """Of fenced steps of so many tokens, one more and so on: up to ``count`` more, and as many as there may be."""
        scale, first = self._scales[True], min(num_tokens, self.most)
        return [scale * seconds for seconds in self._table[first : first + count + 1]]

    def observe(self, num_tokens: int, seconds: float, is_fenced: bool) -> None:
        """What a step took, of so many tokens with their drafts."""
        expected = self.seconds(num_tokens, is_fenced)
        surprise = min(MAX_SURPRISE, seconds / expected) - 1.0
        self._scales[is_fenced] *= 1.0 + SCALE_RATE * surprise
        at = self._find(num_tokens)
        is_new = self._weights[at] < MEASURED_WEIGHT
        self._weights[at] = min(MAX_WEIGHT, self._weights[at] + 1)
        self._seconds[at] *= 1.0 + surprise / self._weights[at]
        self._num_observed += 1
        if self._num_observed % OBSERVED == 0 or is_new:
            self._make_table()

    def _find(self, num_tokens: int) -> int:
        """The index of a size, which is from here on one of those that are known."""
        sizes = self._sizes
        at = bisect_left(sizes, num_tokens)
        if at == len(sizes) or sizes[at] != num_tokens:
            sizes.insert(at, num_tokens)
            self._seconds.insert(at, self._table[num_tokens])
            self._weights.insert(at, GUESSED_WEIGHT)
        return at

    def _make_table(self) -> None:
        """Straight lines between the sizes; the last one goes on."""
        # More tokens never take less: a size that seems to take more than a larger one was disturbed.
        seconds = np.minimum.accumulate(np.array(self._seconds)[::-1])[::-1].tolist()
        sizes = self._sizes
        if sizes[-1] < self.most:
            slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else seconds[-1] / sizes[-1]
            sizes, seconds = [*sizes, self.most], [*seconds, seconds[-1] + slope * (self.most - sizes[-1])]
        self._table: list[float] = np.interp(np.arange(self.most + 1), sizes, seconds).tolist()

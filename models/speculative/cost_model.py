"""The time of a step by its number of tokens: measured at worker start, and then learned from each step."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import numpy as np

SIZES = (16, 1, 64, 4, 32, 8, 48, 2, 24, 12, 6, 3)
"""Tokens of the steps to measure, in this order while time allows. Sizes in between are interpolated."""
MEASURE_S = 1.0
ROUNDS = 4
"""How often each size is measured if time allows. The shortest time counts, since nothing makes a step too short."""
MIN_S = 1e-5

LARGER = (17, 33, 128, 256)
"""Further sizes in the table: two that may take much longer than one token less, since kernels compute 16 rows
together, and larger ones."""

SCALE_RATE = 0.1
"""Learning rate of the scale. Load and context lengths change quickly, and affect all sizes about equally."""
MEASURED_WEIGHT, GUESSED_WEIGHT, MAX_WEIGHT = 4.0, 1.0, 100.0
"""How well the time of a size is known, as the equivalent number of observed steps."""
MAX_SURPRISE = 2.0
"""Cap on an observed time relative to the expected one. Beyond it, something else delayed the step."""


class StepCost:
    """seconds(n) = scale * s(n), for a step of n tokens that are all sampled; s is known at some sizes, and linear
    between them.

    There are two scales: one for fenced steps, which start after the previous one has ended, since their drafts follow
    from its tokens; and one for steps that are queued by then, which only a backend that runs ahead has.
    """

    def __init__(self, most: int, guess: tuple[float, float] = (1e-3, 2e-3)) -> None:
        """``most`` limits the tokens of a step. ``guess`` has the unmeasured times of steps of 1 and of 64 tokens."""
        self.most = most
        self._scales = [1.0, 1.0]
        self._rising: list[float] | None = None
        self.know({1: guess[0], 64: guess[1]}, GUESSED_WEIGHT)

    def measure(self, run: Callable[[int], object], most: int, clock: Callable[[], float]) -> None:
        """Measures ``run(n)``, which computes a step of n tokens, up to ``most``. ``clock`` returns seconds."""
        best: dict[int, float] = {}
        end = clock() + MEASURE_S
        for number in range(ROUNDS * len(SIZES)):
            size = min(most, SIZES[number % len(SIZES)])
            began = clock()
            if began > end and len(best) >= min(2, most):
                break
            run(size)
            best[size] = min(best.get(size, float("inf")), max(MIN_S, clock() - began))
        self.know(best)

    def seconds(self, num_tokens: int, is_fenced: bool = True) -> float:
        """Returns the time of a step. ``is_fenced`` is whether it starts after the previous one has ended."""
        rising = self._rising_seconds()
        return self._scales[is_fenced] * sum(part * rising[at] for at, part in self._parts(num_tokens))

    def span(self, num_tokens: int, count: int) -> list[float]:
        """Returns the times of fenced steps of ``num_tokens``, one more, and so on, to ``count`` more or ``most``."""
        first = min(num_tokens, self.most)
        wanted = np.arange(first, min(first + count, self.most) + 1)
        seconds: list[float] = (self._scales[True] * np.interp(wanted, self._sizes, self._rising_seconds())).tolist()
        return seconds

    def observe(self, num_tokens: int, seconds: float, is_fenced: bool) -> None:
        """Learns from the time of a step. ``num_tokens`` includes its drafts."""
        surprise = min(MAX_SURPRISE, seconds / self.seconds(num_tokens, is_fenced)) - 1.0
        self._scales[is_fenced] *= 1.0 + SCALE_RATE * surprise
        # A Kalman filter: a size has the variance 1 / weight, a step 1.
        parts = self._parts(num_tokens)
        variance = 1.0 + sum(part * part / self._weights[at] for at, part in parts)
        for at, part in parts:
            weight = self._weights[at]
            self._seconds[at] *= 1.0 + surprise * part / (weight * variance)
            self._weights[at] = min(MAX_WEIGHT, weight + part)
        self._rising = None

    def know(self, seconds: Mapping[int, float], weight: float = MEASURED_WEIGHT) -> None:
        """Sets the times of these sizes, and how well they are known. Other sizes are guessed from them."""
        sizes = sorted(size for size in seconds if size <= self.most)
        known = _isotonic([seconds[size] for size in sizes], [1.0] * len(sizes))
        self._sizes = sorted({*(size for size in (*SIZES, *LARGER) if size < self.most), self.most, *sizes})
        if sizes[-1] < self.most:
            width = sizes[-1] - sizes[-2] if len(sizes) > 1 else sizes[-1]
            slope = (known[-1] - (known[-2] if len(sizes) > 1 else 0.0)) / width
            known.append(known[-1] + slope * (self.most - sizes[-1]))
            sizes.append(self.most)
        self._seconds: list[float] = np.interp(self._sizes, sizes, known).tolist()
        self._weights = [weight if size in seconds else GUESSED_WEIGHT for size in self._sizes]
        self._rising = None

    def _rising_seconds(self) -> list[float]:
        """Returns the times at the sizes, made non-decreasing: more tokens never take less time."""
        rising = self._rising
        if rising is None:
            rising = self._rising = _isotonic(self._seconds, self._weights)
        return rising

    def _parts(self, num_tokens: int) -> tuple[tuple[int, float], ...]:
        """Returns the sizes around ``num_tokens``, each as its index and its weight in the interpolation."""
        at = bisect_left(self._sizes, num_tokens)
        if at == len(self._sizes):
            return ((at - 1, 1.0),)
        if at == 0 or self._sizes[at] == num_tokens:
            return ((at, 1.0),)
        below, above = self._sizes[at - 1], self._sizes[at]
        part = (num_tokens - below) / (above - below)
        return ((at - 1, 1.0 - part), (at, part))


def _isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Returns the non-decreasing values that are nearest by weighted least squares: values that fall are replaced by
    their weighted mean. (Pool adjacent violators.)"""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            other, other_weight, other_count = pools.pop()
            value = (value * weight + other * other_weight) / (weight + other_weight)
            weight, count = weight + other_weight, count + other_count
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]

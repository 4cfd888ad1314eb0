"""What a step of so many tokens takes: measured when the worker starts, and kept up to date with what steps take."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

SIZES = (16, 1, 64, 4, 32, 8, 48, 2, 24, 12, 6, 3)
"""Tokens of the steps that are measured, in this order as far as time allows; what is between them is interpolated."""
MEASURE_S = 1.0
ROUNDS = 4
"""Times that each is measured where there is time; the shortest counts, since nothing makes a step too short."""
MIN_S = 1e-5

LARGER = (17, 33, 128, 256)
"""Sizes that are known besides: two that may take much longer than one less, since kernels compute 16 rows together,
and larger ones."""

SCALE_RATE = 0.1
"""How fast what steps take changes the scale: load and contexts change all sizes alike, about, and soon."""
MEASURED_WEIGHT, GUESSED_WEIGHT, MAX_WEIGHT = 4.0, 1.0, 100.0
"""What is known of a size's own seconds, as if seen in so many steps."""
MAX_SURPRISE = 2.0
"""A step that took longer than was expected by more than this counts as this: something else came between."""


class StepCost:
    """seconds(n) = scale * s(n), of a step of n tokens all of which are sampled; s is known at some sizes, and between
    them a straight line.

    There are two scales: of steps that began when the last one was over, since drafts follow from its tokens; and of
    those that were there by then, which only a backend that runs ahead has.
    """

    def __init__(self, most: int, guess: tuple[float, float] = (1e-3, 2e-3)) -> None:
        """``most``: tokens of a step; ``guess``: what steps of 1 and of 64 take, until that is measured."""
        self.most = most
        self._scales = [1.0, 1.0]
        self._rising: list[float] | None = None
        self._know({1: guess[0], 64: guess[1]}, GUESSED_WEIGHT)

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
        self._know(best, MEASURED_WEIGHT)

    def seconds(self, num_tokens: int, is_fenced: bool = True) -> float:
        """Of a step; ``is_fenced``: it begins when the last one is over."""
        rising = self._rising_seconds()
        return self._scales[is_fenced] * sum(part * rising[at] for at, part in self._parts(num_tokens))

    def span(self, num_tokens: int, count: int) -> list[float]:
        """Of fenced steps of so many tokens, one more and so on: up to ``count`` more, and as many as there may be."""
        first = min(num_tokens, self.most)
        wanted = np.arange(first, min(first + count, self.most) + 1)
        seconds: list[float] = (self._scales[True] * np.interp(wanted, self._sizes, self._rising_seconds())).tolist()
        return seconds

    def observe(self, num_tokens: int, seconds: float, is_fenced: bool) -> None:
        """What a step took, of so many tokens with their drafts."""
        surprise = min(MAX_SURPRISE, seconds / self.seconds(num_tokens, is_fenced)) - 1.0
        self._scales[is_fenced] *= 1.0 + SCALE_RATE * surprise
        # Kalman's filter, with variances 1 / weight, and 1 of a step.
        parts = self._parts(num_tokens)
        variance = 1.0 + sum(part * part / self._weights[at] for at, part in parts)
        for at, part in parts:
            weight = self._weights[at]
            self._seconds[at] *= 1.0 + surprise * part / (weight * variance)
            self._weights[at] = min(MAX_WEIGHT, weight + part)
        self._rising = None

    def _know(self, seconds: dict[int, float], weight: float) -> None:
        """Of these sizes what they take, and how well that is known; others are guessed from them."""
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
        """At the sizes: more tokens never take less."""
        rising = self._rising
        if rising is None:
            rising = self._rising = _isotonic(self._seconds, self._weights)
        return rising

    def _parts(self, num_tokens: int) -> tuple[tuple[int, float], ...]:
        """The sizes around it by their indexes, and by how near they are."""
        at = bisect_left(self._sizes, num_tokens)
        if at == len(self._sizes):
            return ((at - 1, 1.0),)
        if at == 0 or self._sizes[at] == num_tokens:
            return ((at, 1.0),)
        below, above = self._sizes[at - 1], self._sizes[at]
        part = (num_tokens - below) / (above - below)
        return ((at - 1, 1.0 - part), (at, part))


def _isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest values that never fall, by squares: more tokens never take less, so where they seem to, all of these
    sizes take their mean, by how well each is known. (Pool adjacent violators.)"""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            other, other_weight, other_count = pools.pop()
            value = (value * weight + other * other_weight) / (weight + other_weight)
            weight, count = weight + other_weight, count + other_count
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]

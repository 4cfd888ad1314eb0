"""Histograms with fixed bucket bounds, without names and labels."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Distribution:
    """The content of a histogram at one moment."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """Number of values in each bucket, including its upper bound. The last bucket has the values above all bounds."""
    sum: float

    @property
    def count(self) -> int:
        """The number of all values."""
        return sum(self.counts)


class Histogram:
    """Counts values. One observation is a binary search and two additions: cheap enough for every token."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds`` are in ascending order."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def read(self, bounds: tuple[float, ...]) -> Distribution:
        """Returns exactly what a histogram with ``bounds`` would hold; these are a subset of its own bounds.

        its own     |--1--|--4--|--2--|--0--|  the rest
        bounds      |-----5-----|-----2-----|  the rest
        """
        assert set(bounds) <= set(self._bounds), "values would be counted in the wrong buckets"
        counts = [0] * (len(bounds) + 1)
        for bound, count in zip(self._bounds, self._counts, strict=False):
            counts[bisect_left(bounds, bound)] += count
        counts[-1] += self._counts[-1]
        return Distribution(bounds, tuple(counts), self._sum)


def merged(*bounds: Sequence[float]) -> tuple[float, ...]:
    """Returns the bounds of a histogram that can be read with any of these."""
    return tuple(sorted(set().union(*bounds)))


def one_two_five(limit: float) -> tuple[float, ...]:
    """Returns 1, 2, 5, 10, 20, 50 ... up to ``limit``."""
    found = []
    decade = 1
    while decade <= limit:
        found += [decade * step for step in (1, 2, 5) if decade * step <= limit]
        decade *= 10
    return tuple(map(float, found))

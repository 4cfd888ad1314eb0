"""Histograms without names and labels: with given bucket bounds, or with bounds that grow by a factor."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LEAST_S = 1e-6
_GROWTH = 1.08
"""The quotient of two neighbouring bounds of a ``LogHistogram``."""
_LAST_BUCKET = 320
"""The bucket of everything above 14 hours. It limits the memory of a ``LogHistogram``."""
_PER_LOG = 1 / math.log(_GROWTH)


@dataclass(frozen=True, slots=True)
class Distribution:
    """The content of a histogram at one moment."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """Number of values in each bucket, including its upper bound. The last bucket has the values above all bounds."""
    sum: float

    @property
    def count(self) -> int:
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


class LogHistogram:
    """Counts times in buckets from 1 microsecond on, each 8 % wider than the one before, so that a percentile is within
    4 % of the exact value. Only buckets with values take memory."""

    __slots__ = ("count", "counts")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        """The number of values in each bucket that has any."""
        self.count = 0
        """The number of all values."""

    def observe(self, seconds: float, times: int = 1) -> None:
        """Counts a value ``times`` times. Takes a logarithm and two additions."""
        bucket = min(int(math.log(seconds / _LEAST_S) * _PER_LOG), _LAST_BUCKET) if seconds > _LEAST_S else 0
        self.counts[bucket] = self.counts.get(bucket, 0) + times
        self.count += times

    @classmethod
    def sum(cls, histograms: Iterable["LogHistogram"]) -> "LogHistogram":
        total = cls()
        for histogram in histograms:
            total.count += histogram.count
            for bucket, count in histogram.counts.items():
                total.counts[bucket] = total.counts.get(bucket, 0) + count
        return total

    def percentile(self, percent: int) -> float:
        """Returns the value at the nearest rank, in seconds; 0 if there are no values."""
        rank = -(-self.count * percent // 100)
        for bucket, count in sorted(self.counts.items()):
            rank -= count
            if rank <= 0:
                return _LEAST_S * math.pow(_GROWTH, bucket + 0.5)
        return 0.0

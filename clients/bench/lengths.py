"""The distributions of prompt and output lengths in ``penstock bench``, in tokens."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Uniform:
    """All lengths from ``least`` to ``most`` with equal probability; a fixed length if they are equal."""

    least: int
    most: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"uniform:{self.least}-{self.most}"


@dataclass(frozen=True)
class Normal:
    """The normal distribution; values below 1 become 1."""

    mean: float
    deviation: float
    most: ClassVar[None] = None

    def draw(self, rng: random.Random) -> int:
        return max(1, round(rng.gauss(self.mean, self.deviation)))

    def __str__(self) -> str:
        return f"normal:{self.mean:g},{self.deviation:g}"


@dataclass(frozen=True)
class LogNormal:
    """Few long and many short lengths, like people's prompts. ``mean`` and ``deviation`` are those of the lengths, not
    of their logarithms."""

    mean: float
    deviation: float
    most: ClassVar[None] = None

    def draw(self, rng: random.Random) -> int:
        variance = math.log1p((self.deviation / self.mean) ** 2)
        return max(1, round(rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))))

    def __str__(self) -> str:
        return f"lognormal:{self.mean:g},{self.deviation:g}"


LengthDistribution = Uniform | Normal | LogNormal
"""``draw`` returns a length of at least 1; ``most`` is the greatest one, or None if there is no limit."""

_FORMS = "512, uniform:128-1024, normal:MEAN,DEVIATION or lognormal:MEAN,DEVIATION"


def parse_lengths(text: str) -> LengthDistribution:
    """Parses a distribution from the command line. Raises ValueError, which lists the forms."""
    kind, colon, values = text.partition(":")
    try:
        if not colon:
            return _uniform([kind, kind])
        match kind:
            case "uniform":
                return _uniform(values.split("-"))
            case "normal":
                return Normal(*_mean_and_deviation(values))
            case "lognormal":
                return LogNormal(*_mean_and_deviation(values))
    except (ValueError, TypeError):
        pass
    raise ValueError(f"expected {_FORMS}, each 1 or more, got {text}")


def _uniform(ends: Sequence[str]) -> Uniform:
    least, greatest = map(int, ends)
    if not 1 <= least <= greatest:
        raise ValueError
    return Uniform(least, greatest)


def _mean_and_deviation(values: str) -> tuple[float, float]:
    mean, deviation = map(float, values.split(","))
    if not (1 <= mean < math.inf and 0 <= deviation < math.inf):
        raise ValueError
    return mean, deviation

"""Ratios of our figures to those of the best other engine, with intervals over the turns."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cpu_bench.engines import OURS, Engine
from cpu_bench.results import Row
from cpu_bench.workloads import CONVERSATIONS, OPEN_LOOP

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t at 97.5 %, for 1, 2, ... degrees of freedom; the last one also stands for more of them, which makes an
interval slightly too wide."""


@dataclass(frozen=True)
class Figure:
    """A figure that engines are compared by."""

    name: str
    """Field of ``Measured``, or key of its ``extra``."""
    title: str
    is_higher_better: bool = False


RATE = Figure("tokens_per_s", "Tokens per second", is_higher_better=True)
GOODPUT = Figure("goodput_per_s", "Goodput", is_higher_better=True)
FIRST_TOKEN = Figure("ttft_p50", "First token at p50")
LATER_FIRST_TOKEN = Figure("later_ttft_p50", "First token from the second turn on at p50")
BETWEEN_TOKENS = Figure("itl_p99", "Between tokens at p99")


def figures_of(workload: str) -> tuple[Figure, ...]:
    """Returns the figures that a workload is compared by; the first one decides which engine is the best."""
    if workload == OPEN_LOOP:
        return GOODPUT, FIRST_TOKEN, BETWEEN_TOKENS
    return RATE, (LATER_FIRST_TOKEN if workload == CONVERSATIONS else FIRST_TOKEN), BETWEEN_TOKENS


@dataclass(frozen=True)
class Ratio:
    """Our figure divided by another engine's."""

    value: float
    low: float | None
    """The ends of the 95 % interval; None if there are fewer than two turns."""
    high: float | None
    turns: int

    def __str__(self) -> str:
        return f"{self.value:.2f}" + (f" ({self.low:.2f} to {self.high:.2f})" if self.low is not None else "")


@dataclass(frozen=True)
class Comparison:
    """Ours beside the engine that is best by a figure. ``ratio`` is None if that engine's figure is 0."""

    figure: Figure
    other: Row
    ratio: Ratio | None


def paired_ratio(ours: Sequence[float], others: Sequence[float]) -> Ratio | None:
    """Returns the geometric mean of the ratios of the turns, each with one value of ours and one of the other engine,
    and a t-interval over their logarithms. None if a value is not positive, or there are none."""
    if not ours or min(*ours, *others) <= 0:
        return None
    logs = [math.log(mine / theirs) for mine, theirs in zip(ours, others, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean), None, None, len(logs))
    reach = T_95[min(len(logs) - 1, len(T_95)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), len(logs))


def ours_of(rows: Sequence[Row]) -> Row | None:
    """Returns the row of penstock, if there is one."""
    return next((row for row in rows if row.engine.name == OURS), None)


def absent(rows: Sequence[Row], expected: Sequence[Engine]) -> list[str]:
    """Returns the labels of expected engines that gave no figures."""
    present = {row.engine.label for row in rows}
    return [engine.label for engine in expected if engine.label not in present]


def compare(rows: Sequence[Row], workload: str) -> list[Comparison]:
    """Compares ours with the best other engine by each figure of a workload. The rows are those of one model and
    precision, ours among them. An engine whose KV has fewer bits is never the best."""
    ours = ours_of(rows)
    assert ours is not None
    found = []
    for figure in figures_of(workload):
        others = [row for row in rows if row is not ours and row.engine.is_reference]
        if not others:
            continue
        pick = max if figure.is_higher_better else min
        best = pick(others, key=lambda row: row.median(figure.name))
        mine, theirs = ours.by_turn(figure.name), best.by_turn(figure.name)
        common = sorted(mine.keys() & theirs.keys())
        found.append(
            Comparison(figure, best, paired_ratio([mine[turn] for turn in common], [theirs[turn] for turn in common]))
        )
    return found

"""What the runs gave: figures of one repetition, kept in a file, and medians over repetitions. Knows no process."""

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cpu_bench.engines import OURS, Engine
from cpu_bench.workloads import OPEN_LOOP

FOREIGN_SHARE = 0.03
"""Of a core, on the average over the run: what others take beyond it makes a row doubtful."""
FAR_BEHIND = 2.0
"""Times slower, or later, than the best of the other engines."""
LATENESS_COUNTS = ("W2",)
"""Workloads where the times to the first token and between tokens decide as well."""
LATENESS = ("ttft_p50", "itl_p99")


@dataclass(frozen=True)
class Measured:
    """One repetition of one workload on one engine. Times in milliseconds unless they say otherwise."""

    engine: str
    model: str
    workload: str
    repetition: int
    version: str
    wall_s: float
    tokens_per_s: float
    ttft_p50: float
    """From when all requests are there, so queueing counts."""
    ttft_p99: float
    itl_p50: float
    """Between the events that bring tokens, over all requests."""
    itl_p99: float
    ready_s: float
    """From the engine's start until it takes requests."""
    rss_bytes: int
    pss_bytes: int
    foreign_s: float
    """CPU seconds that others took meanwhile."""
    extra: dict[str, float] = field(default_factory=dict)


def append(path: Path, measured: Measured) -> None:
    """Adds a line of JSON."""
    _append(path, asdict(measured))


def append_unsupported(path: Path, engine: str, why: str) -> None:
    """Notes that this machine cannot run an engine, so that tables that are made later say so too."""
    _append(path, {"engine": engine, "unsupported": why})


def read(path: Path) -> list[Measured]:
    """Returns what ``append`` wrote."""
    return [Measured(**line) for line in _lines(path) if "unsupported" not in line]


def read_unsupported(path: Path) -> dict[str, str]:
    """Returns what ``append_unsupported`` wrote: reasons by engine."""
    return {line["engine"]: line["unsupported"] for line in _lines(path) if "unsupported" in line}


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@dataclass(frozen=True)
class Row:
    """An engine's medians on one workload."""

    engine: Engine
    runs: tuple[Measured, ...]

    def median(self, name: str) -> float:
        """Returns the median of a field of ``Measured``, or of a key of its ``extra`` that all runs have."""
        return float(statistics.median(_value(run, name) for run in self.runs))

    def by_turn(self, name: str) -> dict[int, float]:
        """Returns the medians of the same in each turn, by the number of the turn."""
        turns = defaultdict(list)
        for run in self.runs:
            turns[run.repetition].append(_value(run, name))
        return {turn: float(statistics.median(values)) for turn, values in turns.items()}

    def extra(self, name: str) -> float | None:
        """Of one of its extra figures, if it has that."""
        values = [run.extra[name] for run in self.runs if name in run.extra]
        return statistics.median(values) if values else None

    @property
    def is_disturbed(self) -> bool:
        """Whether others took much of the machine, in the median repetition."""
        return statistics.median(run.foreign_s / run.wall_s for run in self.runs) > FOREIGN_SHARE


def far_behind(rows: Sequence[Row]) -> set[str]:
    """Labels of those that will not be the best of these rows, which are of one model, workload and precision, however
    often they are repeated. Ours is never among them, nor does it say who is."""
    others = [row for row in rows if row.engine.name != OURS]
    if not others:
        return set()
    workload = rows[0].runs[0].workload
    rate = "goodput_per_s" if workload == OPEN_LOOP else "tokens_per_s"
    fastest = max(row.median(rate) for row in others)
    behind = {row.engine.label for row in others if row.median(rate) * FAR_BEHIND < fastest}
    for name in LATENESS if workload in LATENESS_COUNTS else ():
        soonest = min(row.median(name) for row in others)
        behind -= {row.engine.label for row in others if row.median(name) <= soonest * FAR_BEHIND}
    return behind


def _value(run: Measured, name: str) -> float:
    return float(run.extra[name] if name in run.extra else getattr(run, name))

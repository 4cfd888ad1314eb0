"""What a run gave: figures of one repetition, medians over repetitions, and the table. Knows no process."""

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cpu_bench.engines import OURS, PRECISIONS, Engine
from cpu_bench.wire import Ran, Request

FOREIGN_SHARE = 0.03
"""Of a core, on the average over the run: what others take beyond it makes a row doubtful."""
FAR_BEHIND = 2.0
"""Times slower, or later, than the best of the other engines."""
LATENESS_COUNTS = ("W2",)
"""Workloads where the time between tokens at p99 is compared as well."""


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


def timing(requests: Sequence[Request], ran: Ran) -> dict[str, float]:
    """The figures of ``Measured`` that follow from what came when. Raises ValueError if tokens are missing."""
    for number, ((_, wanted), events) in enumerate(zip(requests, ran.events, strict=True)):
        got = sum(tokens for _, tokens in events)
        if got != wanted:
            raise ValueError(f"request {number} gave {got} tokens and not {wanted}")
    last = max(events[-1][0] for events in ran.events)
    wall = max(ran.ended, last) - ran.began
    first = [events[0][0] - ran.began for events in ran.events]
    gaps = [later - sooner for events in ran.events for (sooner, _), (later, _) in itertools.pairwise(events)]
    return {
        "wall_s": wall,
        "tokens_per_s": sum(num_output for _, num_output in requests) / wall,
        "ttft_p50": 1000 * quantile(first, 0.5),
        "ttft_p99": 1000 * quantile(first, 0.99),
        "itl_p50": 1000 * quantile(gaps, 0.5),
        "itl_p99": 1000 * quantile(gaps, 0.99),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Between the two nearest values, in proportion; 0 where there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def append(path: Path, measured: Measured) -> None:
    """Adds a line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(measured)) + "\n")


def read(path: Path) -> list[Measured]:
    """What ``append`` wrote."""
    return [Measured(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


@dataclass(frozen=True)
class Row:
    """An engine's medians on one workload."""

    engine: Engine
    runs: tuple[Measured, ...]

    def median(self, name: str) -> float:
        """Of a field of ``Measured``."""
        return float(statistics.median(getattr(run, name) for run in self.runs))

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
    fastest = max(row.median("tokens_per_s") for row in others)
    behind = {row.engine.label for row in others if row.median("tokens_per_s") * FAR_BEHIND < fastest}
    if rows[0].runs[0].workload in LATENESS_COUNTS:
        steadiest = min(row.median("itl_p99") for row in others)
        behind -= {row.engine.label for row in others if row.median("itl_p99") <= steadiest * FAR_BEHIND}
    return behind


def tables(
    runs: Iterable[Measured],
    engines: Sequence[Engine],
    missing: Mapping[str, str],
    floors: Mapping[tuple[str, str, str], float],
) -> str:
    """All that is printed at the end, in Markdown. ``missing`` says of each engine that gave nothing why; ``floors``
    has the tokens a second that the machine allows, by model, workload and precision."""
    by_cell: dict[tuple[str, str], dict[str, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        by_cell[run.model, run.workload][run.engine].append(run)
    parts = []
    for (model, workload), found in sorted(by_cell.items()):
        rows = [Row(engine, tuple(found[engine.label])) for engine in engines if engine.label in found]
        for precision in PRECISIONS:
            expected = [engine for engine in engines if engine.precision == precision]
            of_it = [row for row in rows if row.engine.precision == precision]
            if of_it:
                parts.append(f"### {model}, {workload}, {precision}\n")
                parts.append(_table(of_it, floors.get((model, workload, precision))))
                parts.append(_verdict(of_it, expected))
    return "\n".join([*parts, *_footer(by_cell, engines, missing)])


_COLUMNS = ("engine", "tokens/s", "ours is", "share of the floor", "first token p50", "p99", "between tokens p50",
            "p99", "RSS GiB", "PSS GiB", "ready s", "foreign CPU s", "runs")  # fmt: skip


def _table(rows: Sequence[Row], floor: float | None) -> str:
    ours = _ours(rows)
    lines = [f"| {' | '.join(_COLUMNS)} |", f"|---|{'---:|' * (len(_COLUMNS) - 1)}"]
    for row in sorted(rows, key=lambda row: -row.median("tokens_per_s")):
        speed = row.median("tokens_per_s")
        cells = [
            row.engine.label,
            _short(speed),
            "" if ours is None or row is ours else f"{ours.median('tokens_per_s') / speed:.2f}x",
            "" if floor is None else f"{speed / floor:.0%}",
            *(_short(row.median(name)) for name in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")),
            *(f"{row.median(name) / 2**30:.2f}" for name in ("rss_bytes", "pss_bytes")),
            f"{row.median('ready_s'):.1f}",
            f"{row.median('foreign_s'):.1f}{' (!)' if row.is_disturbed else ''}",
            str(len(row.runs)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _verdict(rows: Sequence[Row], expected: Sequence[Engine]) -> str:
    """Ours against the best of the others, or why nothing can be said."""
    ours = _ours(rows)
    present = {row.engine.label for row in rows}
    absent = [engine.label for engine in expected if engine.label not in present]
    if absent:
        return f"\nNo ratio to the best: {', '.join(absent)} gave no figures.\n"
    others = [row for row in rows if row is not ours and row.engine.is_reference]
    assert ours is not None
    fastest = max(others, key=lambda row: row.median("tokens_per_s"))
    steadiest = min(others, key=lambda row: row.median("itl_p99"))
    speed = ours.median("tokens_per_s") / fastest.median("tokens_per_s")
    gap = ours.median("itl_p99") / steadiest.median("itl_p99")
    text = f"\nTokens a second: {speed:.2f}x the best other, {fastest.engine.label}. "
    text += f"Between tokens at p99: {gap:.2f}x the best other, {steadiest.engine.label}."
    lag = ours.extra("loop_lag_p99_ms")
    late = "" if lag is None else f" The service's event loop is {_short(lag)} ms late at p99 of its worst 2 s."
    return f"{text}{late}\n"


def _ours(rows: Sequence[Row]) -> Row | None:
    return next((row for row in rows if row.engine.name == OURS), None)


def _footer(
    by_cell: Mapping[tuple[str, str], Mapping[str, Sequence[Measured]]],
    engines: Sequence[Engine],
    missing: Mapping[str, str],
) -> list[str]:
    versions = {run.engine: run.version for found in by_cell.values() for runs in found.values() for run in runs}
    counts = sorted({len(runs) for found in by_cell.values() for runs in found.values()})
    lines = []
    if counts:
        number = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
        disturbed = f"(!): others took more than {FOREIGN_SHARE:.0%} of a core"
        lines.append(f"Medians of {number} repetitions; times in ms. {disturbed}.")
    lines += [f"- {engine.label} ({versions[engine.label]}): {engine.numbers}; {engine.settings}"
              for engine in engines if engine.label in versions]  # fmt: skip
    return [*lines, *(f"- missing: {label}: {why}" for label, why in missing.items())]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"

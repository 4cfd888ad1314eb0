"""The tables that are printed at the end, in Markdown: one for each model, workload and precision."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from cpu_bench.engines import PRECISIONS, Engine
from cpu_bench.report.ratios import absent, compare, ours_of
from cpu_bench.results import FOREIGN_SHARE, Measured, Row
from cpu_bench.workloads import CONVERSATIONS, OPEN_LOOP


def tables(
    runs: Iterable[Measured],
    engines: Sequence[Engine],
    missing: Mapping[str, str],
    floors: Mapping[tuple[str, str, str], float],
) -> str:
    """Returns all that is printed at the end. ``engines`` are those that ratios need, ``missing`` has the reason for
    each engine that gave nothing, and ``floors`` has the tokens per second that the machine allows, by model, workload
    and precision."""
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
                parts.append(_table(of_it, workload, floors.get((model, workload, precision))))
                parts.append(_verdict(of_it, workload, expected))
    return "\n".join([*parts, *_footer(by_cell, engines, missing)])


_COLUMNS = ("engine", "tokens/s", "ours is", "share of the floor", "first token p50", "p99", "between tokens p50",
            "p99", "RSS GiB", "PSS GiB", "ready s", "foreign CPU s", "runs")  # fmt: skip
_MORE_COLUMNS = {
    OPEN_LOOP: {
        "arrivals/s": "arrivals_per_s", "goodput/s": "goodput_per_s", "by the mean gap": "goodput_by_mean_per_s",
        "share in time": "goodput_share",
    },
    CONVERSATIONS: {"first token p50, turns 2 to 6": "later_ttft_p50"},
}  # fmt: skip
"""Columns of one workload, with keys of the runs' ``extra``."""


def _table(rows: Sequence[Row], workload: str, floor: float | None) -> str:
    ours = ours_of(rows)
    more = _MORE_COLUMNS.get(workload, {})
    columns = (*_COLUMNS, *more)
    lines = [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    for row in sorted(rows, key=lambda row: -row.median("tokens_per_s")):
        speed = row.median("tokens_per_s")
        cells = [
            row.engine.label,
            short(speed),
            "" if ours is None or row is ours else f"{ours.median('tokens_per_s') / speed:.2f}x",
            "" if floor is None else f"{speed / floor:.0%}",
            *(short(row.median(name)) for name in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")),
            *(f"{row.median(name) / 2**30:.2f}" for name in ("rss_bytes", "pss_bytes")),
            f"{row.median('ready_s'):.1f}",
            f"{row.median('foreign_s'):.1f}{' (!)' if row.is_disturbed else ''}",
            str(len(row.runs)),
            *(_more_cell(name, row.median(name)) for name in more.values()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _more_cell(name: str, value: float) -> str:
    return f"{value:.0%}" if name.endswith("_share") else f"{value:.3f}" if name.endswith("_per_s") else short(value)


def _verdict(rows: Sequence[Row], workload: str, expected: Sequence[Engine]) -> str:
    """Compares ours with the best other engine, or says why nothing can be compared."""
    if missing := absent(rows, expected):
        return f"\nNo ratio to the best: {', '.join(missing)} gave no figures.\n"
    ours = ours_of(rows)
    assert ours is not None
    sentences = []
    for comparison in compare(rows, workload):
        title, label, ratio = comparison.figure.title, comparison.other.engine.label, comparison.ratio
        if ratio is None:
            sentences.append(f"{title}: no ratio, as ours or the best other's, {label}'s, is 0.")
            continue
        interval = f"95 %: {ratio.low:.2f} to {ratio.high:.2f}, " if ratio.low is not None else ""
        turns = f"{interval}{ratio.turns} turn{'s' if ratio.turns > 1 else ''}"
        sentences.append(f"{title}: {ratio.value:.2f}x the best other, {label} ({turns}).")
    lag = ours.extra("loop_lag_p99_ms")
    if lag is not None:
        sentences.append(f"The service's event loop is {short(lag)} ms late at p99 of its worst 2 s.")
    return f"\n{' '.join(sentences)}\n"


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
        lines.append(
            f"Medians of {number} repetitions; times in ms. {disturbed}. Ratios to the best are geometric means over "
            "the turns that both engines ran, each with a paired 95 % t-interval over the logarithms."
        )
    lines += [f"- {engine.label} ({versions[engine.label]}): {engine.numbers}; {engine.settings}"
              for engine in engines if engine.label in versions]  # fmt: skip
    return [*lines, *(f"- missing: {label}: {why}" for label, why in missing.items())]


def short(value: float) -> str:
    """Writes a number as the tables do: with one decimal below 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"

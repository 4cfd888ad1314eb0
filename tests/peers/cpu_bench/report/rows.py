"""Rows for the tables of README.md and docs/benchmarks.md, in Markdown."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from cpu_bench.engines import OURS, PRECISIONS, Engine
from cpu_bench.report.ratios import (
    BETWEEN_TOKENS,
    FIRST_TOKEN,
    GOODPUT,
    LATER_FIRST_TOKEN,
    RATE,
    Figure,
    absent,
    compare,
    ours_of,
)
from cpu_bench.report.tables import short
from cpu_bench.results import Measured, Row
from cpu_bench.workloads import AT_ONCE, CONVERSATIONS, MIXED, OPEN_LOOP

TITLES = {"vllm-cpu": "vLLM", "vllm-zen": "vLLM with zentorch", "openvino": "OpenVINO"}
PAGE_COLUMNS: tuple[tuple[str, str, Figure], ...] = (
    *((workload, workload, RATE) for workload in AT_ONCE),
    ("first token", MIXED, FIRST_TOKEN),
    ("between tokens", MIXED, BETWEEN_TOKENS),
    ("W5, in time per s", OPEN_LOOP, GOODPUT),
    ("W6, first token", CONVERSATIONS, LATER_FIRST_TOKEN),
)
"""Columns of the tables in docs/benchmarks.md: title, workload, figure."""
README_COLUMNS: tuple[tuple[str, str, Figure], ...] = (
    ("16 requests", "W1", RATE), ("mixed lengths", "W2", RATE), ("shared prefix", "W3", RATE),
    ("1 request", "W4", RATE), ("p99 between tokens, mixed", "W2", BETWEEN_TOKENS),
)  # fmt: skip
RATIO_TITLE = f"**{OURS} / best other**"

Tables = dict[str, list[Row]]
"""The rows of one model and precision by workload."""
Floors = Mapping[tuple[str, str, str], float]


def page_rows(runs: Iterable[Measured], engines: Sequence[Engine], floors: Floors) -> str:
    """Returns all rows: for each model and precision those of docs/benchmarks.md, and those of README.md."""
    by_cell: dict[str, dict[str, dict[str, list[Measured]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for run in runs:
        by_cell[run.model][run.workload][run.engine].append(run)
    parts = []
    for model, by_workload in sorted(by_cell.items()):
        readme = [_line(["engine", "weights", *(title for title, _, _ in README_COLUMNS)]),
                  _line(["---", "---", *["--:"] * len(README_COLUMNS)])]  # fmt: skip
        for precision in PRECISIONS:
            expected = [engine for engine in engines if engine.precision == precision]
            tables = {
                workload: [Row(engine, tuple(found[engine.label])) for engine in expected if engine.label in found]
                for workload, found in by_workload.items()
            }
            if any(tables.values()):
                parts.append(_page_table(model, precision, tables, expected, floors))
                readme += _readme_lines(precision, tables, expected)
        parts.append(f"README.md, {model}:\n\n" + "\n".join(readme))
    return "\n\n".join(parts) + "\n"


def _page_table(model: str, precision: str, tables: Tables, expected: Sequence[Engine], floors: Floors) -> str:
    lines = [
        _line([f"{model}, {precision}", *(title for title, _, _ in PAGE_COLUMNS), "RSS"]),
        _line(["---", *["---:"] * (len(PAGE_COLUMNS) + 1)]),
    ]
    for engine in expected:
        found = {workload: row for workload, rows in tables.items() for row in rows if row.engine is engine}
        if found:
            largest = max((row.median("rss_bytes") for name, row in found.items() if name in AT_ONCE), default=None)
            rss = "" if largest is None else f"{largest / 2**30:.1f}"
            lines.append(_line([_title(engine, found.values()), *_cells(found, PAGE_COLUMNS), rss]))
    lines.append(_line([RATIO_TITLE, *_ratio_cells(tables, expected, PAGE_COLUMNS), ""]))
    shares = []
    for _, workload, figure in PAGE_COLUMNS:
        ours, floor = ours_of(tables.get(workload, [])), floors.get((model, workload, precision))
        shares.append(f"{ours.median(figure.name) / floor:.0%}" if figure is RATE and ours and floor else "")
    lines.append(_line(["share of the floor", *shares, ""]))
    return "\n".join(lines)


def _readme_lines(precision: str, tables: Tables, expected: Sequence[Engine]) -> list[str]:
    lines = []
    for engine in expected:
        found = {workload: row for workload, rows in tables.items() for row in rows if row.engine is engine}
        if found:
            weights = precision if engine.variant.startswith(precision) else engine.variant
            *speeds, gap = _cells(found, README_COLUMNS)
            cells = [_title(engine, found.values()), weights, *speeds, f"{gap} ms" if gap else ""]
            lines.append(_line(cells))
    return [*lines, _line([RATIO_TITLE, precision, *_ratio_cells(tables, expected, README_COLUMNS)])]


def _title(engine: Engine, rows: Iterable[Row]) -> str:
    """Names the engine, its version and, where it has several settings of one precision, its variant."""
    version = next(run.version for row in rows for run in row.runs).split()[1].rstrip(",")
    name = TITLES.get(engine.name, engine.name)
    return name if engine.name == OURS else f"{name} {version}, {engine.variant}"


def _cells(found: Mapping[str, Row], columns: Sequence[tuple[str, str, Figure]]) -> list[str]:
    cells = []
    for _, workload, figure in columns:
        row = found.get(workload)
        value = None if row is None else row.median(figure.name)
        cells.append("" if value is None else f"{value:.3f}" if figure is GOODPUT else short(value))
    return cells


def _ratio_cells(tables: Tables, expected: Sequence[Engine], columns: Sequence[tuple[str, str, Figure]]) -> list[str]:
    """Returns the ratios with their intervals. A cell is empty if an expected engine gave no figures there."""
    cells = []
    for _, workload, figure in columns:
        rows = tables.get(workload, [])
        found = [] if absent(rows, expected) else compare(rows, workload)
        ratio = next((comparison.ratio for comparison in found if comparison.figure is figure), None)
        cells.append("" if ratio is None else str(ratio))
    return cells


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"

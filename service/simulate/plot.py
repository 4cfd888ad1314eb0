"""Plots a sweep: throughput against the p99 of each latency. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from penstock.clients.bench.report import Slo
from penstock.service.simulate.run import SimulatedRun
from penstock.service.simulate.settings import RATE

_PANELS = (("ttft", "time to first token"), ("itl", "time between messages"), ("e2e", "end to end"))
_SLO_COLOUR = "#c8553d"


def plot_sweep(runs: Sequence[SimulatedRun], title: str, path: Path, slo: Slo | None = None) -> None:
    """Writes a PNG. The runs of a configuration at several rates are one line."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a display and keeps global state

    figure = Figure(figsize=(12, 4.6), dpi=80, layout="constrained")
    figure.suptitle(title, fontsize=10)
    lines: dict[str, list[SimulatedRun]] = {}
    for run in runs:
        named = ", ".join(f"{name} {value}" for name, value in run.service.swept.items() if name != RATE)
        lines.setdefault(named or "rate", []).append(run)
    axes = figure.subplots(1, len(_PANELS))
    for (name, label), axis in zip(_PANELS, axes, strict=True):
        for named, line in lines.items():
            points = [
                (run.report.summary()["requests_per_s"], times["p99"] * 1e3)
                for run in sorted(line, key=lambda run: run.service.rate)
                if (times := run.report.summary()["times_s"][name]) is not None
            ]
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=4, label=named)
        if slo is not None and (bound := getattr(slo, name)) is not None:
            axis.axhline(bound * 1e3, color=_SLO_COLOUR, linewidth=2, label=f"SLO {bound * 1e3:.4g} ms")
        axis.set_title(label, fontsize=9)
        axis.set_xlabel("requests/s", fontsize=8)
        axis.set_ylabel("p99, ms", fontsize=8)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=8)
    axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, format="png")

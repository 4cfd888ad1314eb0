"""Plots a run: the distributions of its times, and its course. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.clients.bench.report import Report, Slo, quantile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = (("ttft", "time to first token"), ("itl", "time between messages"), ("e2e", "end to end"))
_MAX_BARS = 60
_LINES = (("p50", 0.5, "-"), ("p90", 0.9, "--"), ("p99", 0.99, ":"))
_COLOUR, _SECOND = "#3b6ea5", "#c8553d"


def plot(report: Report, title: str, path: Path, slo: Slo | None = None) -> None:
    """Writes a PNG."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a display and keeps global state

    figure = Figure(figsize=(10, 6.4), dpi=80, layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(2, 2).flat
    times = report.times()
    for (name, label), axis in zip(_PANELS, axes, strict=False):
        _distribution(axis, sorted(times[name]), label, getattr(slo, name) if slo else None)
    _course(axes[3], report)
    figure.savefig(path, format="png")


def _distribution(axis: "Axes", values: Sequence[float], label: str, bound: float | None) -> None:
    axis.set_title(label, fontsize=9)
    if not values:
        axis.text(0.5, 0.5, "none", ha="center", va="center", transform=axis.transAxes)
        return
    # The last 1 % may be outliers, which would squeeze the rest into one bar. The table has them.
    end = max(1.3 * quantile(values, 0.99), 1e-6)
    milliseconds = [value * 1e3 for value in values if value <= end]
    axis.hist(milliseconds, bins=min(_MAX_BARS, max(8, len(values) // 4)), range=(0, end * 1e3), color=_COLOUR)
    for name, share, style in _LINES:
        at = quantile(values, share) * 1e3
        axis.axvline(at, color="black", linestyle=style, linewidth=1, label=f"{name} {at:.4g} ms")
    if bound is not None and bound <= end:
        axis.axvline(bound * 1e3, color=_SECOND, linewidth=2, label=f"SLO {bound * 1e3:.4g} ms")
    axis.set_xlabel("ms", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=8, frameon=False)


def _course(axis: "Axes", report: Report) -> None:
    """Plots tokens per second and the number of requests in flight."""
    width = max(report.seconds / _MAX_BARS, 1e-3)
    tokens, running = [0.0] * (_MAX_BARS + 1), [0.0] * (_MAX_BARS + 1)
    for record in report.records:
        for when, count in zip(record.message_s, record.message_tokens, strict=True):
            tokens[_bar(when - report.began_s, width)] += count / width
        sent, ended = record.sent_s - report.began_s, record.ended_s - report.began_s
        for bar in range(_bar(sent, width), _bar(ended, width) + 1):
            running[bar] += max(0.0, min(ended, (bar + 1) * width) - max(sent, bar * width)) / width
    starts = [bar * width for bar in range(_MAX_BARS)]
    axis.step(starts, tokens[:_MAX_BARS], where="post", color=_COLOUR, label="output tokens/s")
    axis.set_ylim(bottom=0)
    axis.set_title("course of the run", fontsize=9)
    axis.set_xlabel("s", fontsize=8)
    axis.set_ylabel("output tokens/s", fontsize=8, color=_COLOUR)
    other = axis.twinx()
    other.step(starts, running[:_MAX_BARS], where="post", color=_SECOND, linewidth=1)
    other.set_ylim(bottom=0)
    other.set_ylabel("requests in flight", fontsize=8, color=_SECOND)
    for each in (axis, other):
        each.tick_params(labelsize=8)


def _bar(seconds: float, width: float) -> int:
    return min(max(int(seconds / width), 0), _MAX_BARS)

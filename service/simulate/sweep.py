"""Simulates configurations side by side: their table, and the cheapest that meets the SLOs."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from enum import Enum
from typing import Any, NamedTuple

from penstock.clients.bench.report import Report, Slo
from penstock.service.simulate.run import SimulatedRun
from penstock.service.simulate.settings import RATE, SETTINGS, SimulatedService


def configurations(base: SimulatedService, sweep: Mapping[str, Sequence[Any]]) -> list[SimulatedService]:
    """Returns the service with every combination of the swept settings. Raises ValueError if one is impossible."""
    services = []
    for values in itertools.product(*sweep.values()):
        swept = dict(zip(sweep, values, strict=True))
        service = base
        for name, value in swept.items():
            service = SETTINGS[name].apply(service, value)
        services.append(replace(service, swept=swept))
    return services


class BestConfiguration(NamedTuple):
    """The cheapest configuration at one rate, or the best one if none meets the SLOs."""

    rate: float
    run: SimulatedRun
    share: float
    """The share of all requests within all limits."""
    failing: Mapping[str, float]
    """The limits that too few requests meet, each with the share that meets it; empty if the SLOs are met."""

    @property
    def is_met(self) -> bool:
        return not self.failing


def choose(runs: Sequence[SimulatedRun], slo: Slo, min_share: float) -> Iterator[BestConfiguration]:
    """Yields the choice at each rate: the configuration with the fewest workers in which at least ``min_share`` of the
    requests are within ``slo``, and among those the one with the highest share."""
    for rate in dict.fromkeys(run.service.rate for run in runs):
        rated = [(kept_share(run.report, slo), run) for run in runs if run.service.rate == rate]
        good = [(share, run) for share, run in rated if share >= min_share]
        if good:
            share, run = min(good, key=lambda pair: (pair[1].service.workers, -pair[0]))
            yield BestConfiguration(rate, run, share, {})
        else:
            share, run = max(rated, key=lambda pair: (pair[0], sum(_shares(pair[1].report, slo).values())))
            yield BestConfiguration(rate, run, share, _failing(run.report, slo, min_share))


def kept_share(report: Report, slo: Slo) -> float:
    """Returns the share of the requests that are within the limits."""
    return sum(map(slo.is_kept, report.records)) / max(1, len(report.records))


def _shares(report: Report, slo: Slo) -> dict[str, float]:
    """Returns the share of the requests that are within each limit."""
    bounds = {name: bound for name, bound in asdict(slo).items() if bound is not None}
    return {name: kept_share(report, Slo(**{name: bound})) for name, bound in bounds.items()}


def _failing(report: Report, slo: Slo, min_share: float) -> dict[str, float]:
    shares = _shares(report, slo)
    failing = {name: share for name, share in shares.items() if share < min_share}
    return failing or {min(shares, key=lambda name: shares[name]): min(shares.values())}  # only together too few


def describe_choice(choice: BestConfiguration, slo: Slo, min_share: float, *, is_swept: bool) -> str:
    """Returns a line about a choice. ``is_swept`` is whether there are several rates."""
    at = f"at {choice.rate:g} times the rate, " if is_swept else ""
    service = choice.run.service
    values = ", ".join(f"{name} {_shown(value)}" for name, value in service.swept.items() if name != RATE)
    named = f"{values or 'this configuration'} ({service.workers} worker{'' if service.workers == 1 else 's'})"
    if choice.is_met:
        return f"cheapest: {at}{named}: {choice.share:.1%} of the requests meet the SLOs"
    bounds = asdict(slo)
    parts = [f"{name} {_milliseconds(bounds[name])} is met by {share:.1%}" for name, share in choice.failing.items()]
    return (
        f"none: {at}no configuration meets the SLOs in {min_share:.1%} of the requests; best is {named}, where "
        f"{' and '.join(parts)}"
    )


_HEADINGS = (
    "workers", "req/s", "tokens/s", "ttft p50", "p99", "itl p50", "p99", "e2e p50", "p99", "cached", "preempted",
    "failed", "KV max",
)  # fmt: skip


def sweep_table(runs: Sequence[SimulatedRun], slo: Slo | None) -> str:
    """Returns a table with a line for each run."""
    names = list(runs[0].service.swept)
    headings = [*names, *_HEADINGS, *(["goodput"] if slo else [])]
    lines = [headings, *([*map(_shown, run.service.swept.values()), *_cells(run, slo)] for run in runs)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cells(run: SimulatedRun, slo: Slo | None) -> Iterator[str]:
    summary = run.summary(slo)
    yield str(run.service.workers)
    yield f"{summary['requests_per_s']:.2f}"
    yield f"{summary['output_tokens_per_s']:,.0f}"
    for name in ("ttft", "itl", "e2e"):
        spread = summary["times_s"][name]
        for percentile in ("p50", "p99"):
            yield "-" if spread is None else _milliseconds(spread[percentile])
    yield f"{summary['cached_share']:.0%}"
    yield f"{summary['preemptions']:,}"
    yield f"{sum(not record.is_ok for record in run.report.records):,}"
    yield f"{run.most_kv:.0%}"
    if slo is not None:
        yield f"{kept_share(run.report, slo):.1%}"


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"

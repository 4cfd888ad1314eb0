"""The table that ``penstock bench`` prints, from a report's summary."""

from collections.abc import Iterator, Mapping
from typing import Any

_NAMES = {
    "ttft": "time to first token",
    "itl": "between messages",
    "tpot": "per output token",
    "e2e": "end to end",
}
_COLUMNS = ("mean", "p50", "p90", "p99", "max")
_MAX_SHOWN = 160


def table(summary: Mapping[str, Any]) -> str:
    """Formats counts and rates, the distribution of each time, and warnings about the measurement."""
    parts = ("\n".join(lines) for lines in (_totals(summary), _spreads(summary), _client(summary)))
    return "\n\n".join(filter(None, parts))


def _totals(summary: Mapping[str, Any]) -> Iterator[str]:
    requests = summary["requests"]
    yield _line("requests", f"{requests['ok']:,} of {requests['sent']:,} answered")
    for status, failed in requests["failed"].items():
        message = " ".join(failed["error"].split())[:_MAX_SHOWN]
        yield _line("", f"{failed['count']:,} {status}: {message}")
    yield _line("duration", f"{summary['seconds']:.2f} s" + (" (stopped early)" if summary["was_stopped"] else ""))
    cached = summary["cached_tokens"] / summary["prompt_tokens"] if summary["prompt_tokens"] else 0
    yield _line(
        "throughput",
        f"{summary['requests_per_s']:,.2f} requests/s, {summary['output_tokens_per_s']:,.1f} output tokens/s, "
        f"{summary['prompt_tokens_per_s']:,.1f} prompt tokens/s ({cached:.0%} cached)",
    )
    if (drafts := summary["speculation"]) is not None:
        counts = f"{drafts['drafted_tokens']:,} tokens, {drafts['accepted_share']:.0%} of them accepted"
        yield _line("drafts", f"{counts}; {drafts['mean_length']:.2f} tokens per step with drafts")
    if goodput := summary.get("goodput"):
        bounds = ", ".join(f"{name} {_time(bound)}" for name, bound in goodput["slo_s"].items())
        good = f"{goodput['requests_per_s']:,.2f} requests/s, {goodput['share']:.1%} of all requests"
        yield _line("goodput", f"{good} (within {bounds})")


def _spreads(summary: Mapping[str, Any]) -> Iterator[str]:
    rows = {_NAMES[name]: figures for name, figures in summary["times_s"].items()}
    rows["until failed or refused"] = summary["failed_after_s"]
    if not any(rows.values()):
        return
    yield f"{'':24}" + "".join(f"{column:>10}" for column in _COLUMNS)
    for name, figures in rows.items():
        if figures is not None:
            yield f"{name:24}" + "".join(f"{_time(figures[column]):>10}" for column in _COLUMNS)
    if (errors := summary["predicted_ttft"]) is not None:
        yield f"{'error of predicted TTFT':24}" + "".join(f"{errors[column]:>10.0%}" for column in _COLUMNS)


def _client(summary: Mapping[str, Any]) -> Iterator[str]:
    client, late = summary["client"], summary["sent_late_s"]
    if client is None:  # the run was simulated
        return
    loop = f"its event loop {client['loop_share']:.0%}, {client['busiest_second_share']:.0%} in the busiest second"
    shares = f"{client['process_share']:.0%} of a core ({loop})"
    yield _line("this client", shares + (f"; sent {_time(late['p99'])} late at p99" if late else ""))
    if client["is_limit"]:
        yield "WARNING: this client was busy: the times include its own delays, and the server may be faster."
        yield "         Reduce the load, or share it among several clients."
    elif late and late["p99"] > 0.01:
        yield "WARNING: requests were sent late: another program uses this machine's cores."
    if not summary["requests"]["ok"]:
        yield "WARNING: no request was answered."


def _line(name: str, text: str) -> str:
    return f"{name:14}{text}"


def _time(seconds: float) -> str:
    """Formats a time with a unit and three significant digits."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    milliseconds = seconds * 1e3
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f} ms"

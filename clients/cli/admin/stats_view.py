"""Formats live statistics: the current activity of an engine, from the totals of two updates."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from google.protobuf.duration_pb2 import Duration

import penstock.v1 as pb
from penstock.clients.cli.as_dict import seconds_of

_BAR_WIDTH = 30
_SPARKS = "▁▂▃▄▅▆▇█"
_PERIODS: tuple[tuple[str, Literal["last_10s", "last_60s"]], ...] = (("10 s", "last_10s"), ("60 s", "last_60s"))


@dataclass(frozen=True)
class Rates:
    """Rates per second, between two updates."""

    seconds: float
    steps: float
    prefill_tokens: float
    cached_tokens: float
    output_tokens: float
    drafts: float
    drafted_tokens: float
    accepted_tokens: float
    finished_requests: float
    refused_requests: float
    preemptions: float

    @classmethod
    def between(cls, before: pb.WatchStatsResponse, now: pb.WatchStatsResponse) -> "Rates":
        """Computes rates by the service's clock, so that a slow network does not distort them."""
        seconds = max(seconds_of(now.uptime) - seconds_of(before.uptime), 0.001)
        names = [name for name in cls.__dataclass_fields__ if name != "seconds"]
        return cls(seconds, **{name: (getattr(now, name) - getattr(before, name)) / seconds for name in names})

    @property
    def cached_share(self) -> float:
        """The cached share of the prompts' tokens, 0 to 1."""
        return self.cached_tokens / max(1e-9, self.cached_tokens + self.prefill_tokens)

    @property
    def accepted_share(self) -> float:
        """The accepted share of the drafted tokens, 0 to 1."""
        return self.accepted_tokens / max(1e-9, self.drafted_tokens)

    @property
    def accepted_length(self) -> float:
        """The mean number of tokens per row in a step with drafts."""
        return 1 + self.accepted_tokens / max(1e-9, self.drafts)


def state_name(stats: pb.WatchStatsResponse) -> str:
    """Returns the state's name, such as SERVING or RECOVERING."""
    return pb.ServiceState.Name(stats.state).removeprefix("SERVICE_STATE_")


def line(stats: pb.WatchStatsResponse, rates: Rates) -> str:
    """Formats one line, for a pipe or a log."""
    predicted = f"{_whole_ms(stats.predicted_ttft)} ms" if stats.HasField("predicted_ttft") else "unknown"
    lag = f"{_ms(stats.loop_lag.p99)} at p99" if stats.HasField("loop_lag") else "unknown"
    drafted = ""
    if stats.drafted_tokens:
        drafted = f", drafted {rates.drafted_tokens:.0f} (accepted {100 * rates.accepted_share:.0f} %)"
    return (
        f"{state_name(stats)}: requests {stats.live_requests}, rows {stats.running_rows}, "
        f"waiting {stats.waiting_choices}, stalled {stats.stalled_requests}, KV {100 * stats.kv_usage:.1f} %; "
        f"tokens/s: output {rates.output_tokens:.0f}, prompt {rates.prefill_tokens + rates.cached_tokens:.0f} "
        f"(cached {100 * rates.cached_share:.0f} %){drafted}; step {_ms(stats.step_duration)}; loop lag: {lag}; "
        f"first token predicted: {predicted}; preempted {stats.preemptions}, refused {stats.refused_requests}, "
        f"workers replaced {stats.worker_restarts}{_recent_words(stats)}"
    )


def title(target: str, stats: pb.WatchStatsResponse) -> str:
    """Formats the first line of a screen."""
    return f"penstock top   {target}   {state_name(stats)}   up {_uptime(stats.uptime.seconds)}"


def dashboard(
    target: str,
    before: pb.WatchStatsResponse | None,
    stats: pb.WatchStatsResponse,
    history: Sequence[float],
    unicode: bool,
) -> Iterator[str]:
    """Formats a screen. ``before``: the previous update; ``history``: output tokens per second, the newest last."""
    rates = None if before is None else Rates.between(before, stats)
    yield title(target, stats)
    yield ""
    stalled = f", {stats.stalled_requests:,} of them stalled" if stats.stalled_requests else ""
    yield _row("requests", f"{stats.live_requests:,} live{stalled}")
    yield _row("rows", f"{stats.running_rows:,} run, {stats.waiting_choices:,} wait")
    kept = f"{stats.cached_blocks:,} blocks cached, {stats.retained_blocks:,} of them retained"
    yield _row("KV", f"{_bar(stats.kv_usage, unicode)} {100 * stats.kv_usage:5.1f} % held; {kept}")
    if stats.host_blocks or stats.restored_tokens:
        yield _row(
            "", f"{stats.host_blocks:,} blocks in host memory; {stats.restored_tokens:,} tokens came back from it"
        )
    if stats.state_slots_used:
        missed = f"{stats.state_missed_tokens:,} cached tokens were computed again for lack of one"
        slots = f"{stats.state_slots_used:,} slots used, {stats.state_snapshots:,} by saved states"
        yield _row("states", f"{slots}; {missed}")
    predicted = f"a short request's is predicted after {_whole_ms(stats.predicted_ttft)} ms"
    yield _row("1st token", predicted if stats.HasField("predicted_ttft") else "nothing is known yet")
    lag = stats.loop_lag
    late = f"late by {_ms(lag.p50)} at the median, {_ms(lag.p99)} at p99, {_ms(lag.max)} at most"
    yield _row("loop", late if stats.HasField("loop_lag") else "nothing is known yet")
    if rates is None:
        yield from ("", _row("speed", "known with the next answer"))
    else:
        yield from _speeds(stats, rates, history, unicode)
    yield from _recent_table(stats)
    yield ""
    yield _row(
        "in all",
        f"{stats.output_tokens:,} output tokens, {stats.finished_requests:,} requests ended, "
        f"{stats.refused_requests:,} refused",
    )
    yield _row("", f"preempted: {stats.preemptions:,}; workers replaced: {stats.worker_restarts:,}")
    if stats.tenants:
        yield from _tenants(before, stats, rates)


def _speeds(stats: pb.WatchStatsResponse, rates: Rates, history: Sequence[float], unicode: bool) -> Iterator[str]:
    yield ""
    yield _row("output", f"{rates.output_tokens:10,.0f} tokens/s  {_sparks(history) if unicode else ''}")
    cached = f"{rates.cached_tokens:,.0f} from the cache ({100 * rates.cached_share:.0f} %)"
    yield _row("prompt", f"{rates.prefill_tokens:10,.0f} tokens/s computed, {cached}")
    if stats.drafted_tokens:
        gained = f"{rates.accepted_length:.2f} tokens per step with drafts"
        accepted = f"{100 * rates.accepted_share:.0f} % accepted, {gained}"
        yield _row("drafts", f"{rates.drafted_tokens:10,.0f} tokens/s, {accepted}")
    yield _row("steps", f"{rates.steps:10,.1f} per second, {_ms(stats.step_duration)} at the median")
    yield _row("requests", f"{rates.finished_requests:10,.1f} ended per second, {rates.refused_requests:,.1f} refused")


def _recent(stats: pb.WatchStatsResponse) -> Iterator[tuple[str, list[float], list[str], list[str]]]:
    """Yields the recent periods: the name; the rates of output, computed prompts and requests; the latencies of first
    tokens and between tokens. Yields nothing for a service that does not report them."""
    for name, field in _PERIODS:
        if stats.HasField(field):
            window = getattr(stats, field)
            totals = (window.output_tokens, window.prefill_tokens, window.finished_requests)
            rates = [total / max(0.001, seconds_of(window.duration)) for total in totals]
            yield name, rates, _latencies(window.time_to_first_token), _latencies(window.inter_token_latency)


def _recent_words(stats: pb.WatchStatsResponse) -> str:
    return "".join(
        f"; last {name}: tokens/s {output:.0f} output, {computed:.0f} computed, requests/s {requests:.1f}, "
        f"p50/p90/p99 in ms: first token {'/'.join(first)}, between tokens {'/'.join(between)}"
        for name, (output, computed, requests), first, between in _recent(stats)
    )


def _recent_table(stats: pb.WatchStatsResponse) -> Iterator[str]:
    rows = list(_recent(stats))
    if not rows:
        return
    yield ""
    yield f"{'':10} {'tokens/s':>19} {'requests':>9}   {'first token, ms':>22}   {'between tokens, ms':>22}"
    percentiles = _columns(["p50", "p90", "p99"])
    yield f"{'last':10} {'output':>9} {'computed':>9} {'/s':>9}   {percentiles}   {percentiles}"
    for name, (output, computed, requests), first, between in rows:
        yield f"{name:10} {output:9,.0f} {computed:9,.0f} {requests:9,.1f}   {_columns(first)}   {_columns(between)}"


def _latencies(percentiles: pb.LatencyPercentiles) -> list[str]:
    """Formats the percentiles in milliseconds, with three digits, because they are not exact."""
    if not percentiles.count:
        return ["-"] * 3
    found = (1000 * seconds_of(each) for each in (percentiles.p50, percentiles.p90, percentiles.p99))
    return [f"{ms:,.0f}" if ms >= 99.95 else f"{ms:.1f}" if ms >= 9.995 else f"{ms:.2f}" for ms in found]


def _columns(texts: list[str]) -> str:
    return "  ".join(f"{text:>6}" for text in texts)


def _tenants(before: pb.WatchStatsResponse | None, stats: pb.WatchStatsResponse, rates: Rates | None) -> Iterator[str]:
    served_before = {tenant.tenant: tenant.served_tokens for tenant in before.tenants} if before is not None else {}
    width = max(len("tenant"), *(len(tenant.tenant) for tenant in stats.tenants))
    yield ""
    yield f"{'tenant':{width}}  {'live':>6}  {'tokens/s':>10}  {'served':>14}"
    for tenant in stats.tenants:
        speed = ""
        if rates is not None and tenant.tenant in served_before:
            speed = f"{(tenant.served_tokens - served_before[tenant.tenant]) / rates.seconds:,.0f}"
        yield f"{tenant.tenant:{width}}  {tenant.live_requests:>6,}  {speed:>10}  {tenant.served_tokens:>14,}"


def _ms(value: Duration) -> str:
    return f"{1000 * seconds_of(value):,.1f} ms"


def _whole_ms(value: Duration) -> str:
    return f"{1000 * seconds_of(value):,.0f}"


def _row(title: str, text: str) -> str:
    return f"{title:10} {text}"


def _bar(share: float, unicode: bool) -> str:
    full = round(_BAR_WIDTH * min(1.0, max(0.0, share)))
    return ("█" if unicode else "#") * full + ("░" if unicode else ".") * (_BAR_WIDTH - full)


def _sparks(history: Sequence[float]) -> str:
    """Draws a sparkline, scaled to its maximum."""
    top = max(history, default=0.0)
    return "".join(_SPARKS[round(value / top * (len(_SPARKS) - 1))] if top else _SPARKS[0] for value in history)


def _uptime(seconds: int) -> str:
    days, rest = divmod(seconds, 86_400)
    return f"{f'{days} d ' if days else ''}{timedelta(seconds=rest)}"

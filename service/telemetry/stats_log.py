"""Logs a line about the engine's load at intervals."""

import asyncio
import logging
import time
from collections.abc import Callable

from penstock.scheduler.engine_stats import EngineStats

INTERVAL_S = 10.0

_log = logging.getLogger(__name__)


async def log_stats(stats: Callable[[], EngineStats], interval_s: float) -> None:
    """Logs the engine's load and throughput while it has requests, and nothing while it is idle. Never returns."""
    before, then = stats(), time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        current, now = stats(), time.monotonic()
        if current.requests or current.steps > before.steps:
            _report(before, current, now - then)
        before, then = current, now


def _report(before: EngineStats, stats: EngineStats, seconds: float) -> None:
    computed = stats.prefill_tokens - before.prefill_tokens
    cached = stats.cached_tokens - before.cached_tokens
    data = {
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_percent": round(100 * stats.kv_usage, 1),
        "prompt_tokens_per_s": round((computed + cached) / seconds),
        "output_tokens_per_s": round((stats.output_tokens - before.output_tokens) / seconds),
        "cached_percent": round(100 * cached / max(1, computed + cached)),
        "preempted": stats.preemptions - before.preemptions,
    }
    line = "running %d, waiting %d, KV cache %.1f %%; tokens/s: prompt %.0f, output %.0f; cached %.0f %%; preempted %d"
    drafted = stats.speculation.drafted - before.speculation.drafted
    if drafted:
        data["drafted_tokens_per_s"] = round(drafted / seconds)
        data["accepted_percent"] = round(100 * (stats.speculation.accepted - before.speculation.accepted) / drafted)
        line += "; drafted %.0f tokens/s, accepted %.0f %%"
    _log.info(line, *data.values(), extra={"data": data})

"""The current values of an engine's statistics."""

from penstock.scheduler.engine_stats import EngineStats
from penstock.scheduler.loop.scheduler import Scheduler


def with_current_values(stats: EngineStats, scheduler: Scheduler | None) -> EngineStats:
    """Sets the values that the scheduler knows, and returns the statistics."""
    if scheduler is None:
        return stats
    stats.requests = len(scheduler.requests) - scheduler.tenants.warm_ups.requests
    stats.waiting_tokens = round(scheduler.waiting.work.tokens)
    stats.prefill_tokens_left = stats.waiting_tokens + scheduler.running.prefill_tokens_left
    stats.stalled = scheduler.num_held
    stats.read_cache(scheduler.kv)
    stats.step_s = scheduler.predictor.median_step_s
    return stats

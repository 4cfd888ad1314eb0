"""The engine's load, as GetLoads returns it and as the stream of KV events pushes it."""

import time
from collections.abc import Callable

from smg_grpc_proto.generated import common_pb2 as common, vllm_engine_pb2 as vllm

from penstock.scheduler.engine_stats import EngineStats
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.loop.live_requests import LiveRequestFilter
from penstock.scheduler.worker_config import WorkerFacts
from penstock.service.telemetry.recent_stats import RecentStats

WINDOW_S = 3
"""The number of last seconds over which the rate of output tokens is measured. The current one may have just begun."""
MAX_AGE_S = 0.05
"""How long a reading is reused, so that its cost does not grow with the number of readers."""
_GB = 1e9


class LoadReader:
    """Reads the load of one engine."""

    def __init__(
        self, engine: Engine, facts: WorkerFacts, recent: RecentStats, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._facts = facts
        self._recent = recent
        self._clock = clock
        self._read_at = -MAX_AGE_S
        self._core = common.EngineLoad()
        self._steps = -1
        self._active_at = 0.0
        """The last time at which a step was seen, no request was in flight, or the oldest one arrived."""

    def core(self) -> common.EngineLoad:
        """Returns what routing needs. The caller must not change it."""
        now = self._clock()
        if now - self._read_at >= MAX_AGE_S:
            self._read_at = now
            self._core = self._read(now)
        return self._core

    def add_telemetry(self, load: common.EngineLoad) -> None:
        """Adds the values that are only for operators."""
        facts, stats = self._facts, self._engine.stats()
        num_tokens = facts.num_kv_tokens
        load.cache_hit_rate = _hit_rate(stats)
        load.max_total_num_tokens = num_tokens
        load.num_used_tokens = round(stats.kv_usage * num_tokens)
        load.memory.weight_gb = facts.weight_bytes / _GB
        load.memory.kv_cache_gb = facts.kv_bytes / _GB
        load.memory.token_capacity = num_tokens
        if facts.max_loras:
            load.lora.slots_used, load.lora.slots_total = self._engine.adapters.slots.num_used, facts.max_loras
            load.lora.utilization = load.lora.slots_used / load.lora.slots_total
        drafts = stats.speculation
        if drafts.steps:
            load.speculative.accept_length = 1 + drafts.accepted / drafts.steps
            load.speculative.accept_rate = drafts.accepted / max(1, drafts.drafted)

    def scheduler_load(self) -> vllm.SchedulerLoad:
        """Returns the same as a message of GetLoads."""
        core = self.core()
        load = common.EngineLoad()
        self.add_telemetry(load)
        return vllm.SchedulerLoad(
            num_running_reqs=core.running_requests,
            num_waiting_reqs=core.waiting_requests,
            num_total_reqs=core.running_requests + core.waiting_requests,
            num_used_tokens=load.num_used_tokens,
            max_total_num_tokens=load.max_total_num_tokens,
            token_usage=core.token_usage,
            gen_throughput=core.gen_throughput,
            cache_hit_rate=load.cache_hit_rate,
            utilization=core.token_usage,
            max_running_requests=core.max_running_requests,
            num_waiting_uncached_tokens=core.waiting_uncached_tokens,
        )

    def _read(self, now: float) -> common.EngineLoad:
        stats, window = self._engine.stats(), self._recent.over(WINDOW_S)
        load = common.EngineLoad(
            running_requests=stats.running,
            waiting_requests=stats.waiting,
            waiting_uncached_tokens=stats.waiting_tokens,
            # Both exclude cached blocks that can be evicted: a gateway sends nothing to a worker whose KV cache is
            # full.
            token_usage=stats.kv_usage,
            active_token_usage=stats.kv_usage,
            gen_throughput=window.output_tokens / window.seconds if window.seconds > 0 else 0.0,
            max_running_requests=self._engine.config.max_rows(self._facts),
            prefill_pending_tokens=stats.prefill_tokens_left,
            engine_reports_steps=True,
        )
        if not stats.requests or stats.steps != self._steps:
            self._steps, self._active_at = stats.steps, now
        if stats.requests:
            for oldest in self._engine.scan(LiveRequestFilter()).read(1):
                self._active_at = max(self._active_at, oldest.request.arrival)  # an idle time may not have been read
            load.engine_silence_ms = round((now - self._active_at) * 1000)
        return load


def has_moved(before: common.EngineLoad, now: common.EngineLoad) -> bool:
    """Returns whether two readings differ in values that affect routing. Ignores the rate and times, which always
    differ."""
    names = ("running_requests", "waiting_requests", "waiting_uncached_tokens", "token_usage", "prefill_pending_tokens")
    return any(getattr(before, name) != getattr(now, name) for name in names)


def _hit_rate(stats: EngineStats) -> float:
    num_tokens = stats.cached_tokens + stats.prefill_tokens
    return stats.cached_tokens / num_tokens if num_tokens else 0.0
